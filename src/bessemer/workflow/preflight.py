"""Checks of a recipe against the machine before any work starts, so that errors do not end a run hours later."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bessemer.common.console import size, warn
from bessemer.common.errors import BessemerError, InputError, TooFewIds
from bessemer.guard.alerts import webhook_url
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.scaling_rules import USUAL_RATES
from bessemer.plan.goal import export_problem
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.recipe.uses import built_in_classes
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.run.files import write_atomic
from bessemer.storage import hub
from bessemer.tokens import summary
from bessemer.tokens.shards.store import require_equal_tokenizers
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.choice import framing_of, load_tokenizer, manifest_facts, train_tokenizer
from bessemer.tokens.tokenizer.files import tokenizer_file
from bessemer.train.schedule import learning_rate_share
from bessemer.workflow import derive

if TYPE_CHECKING:
    from bessemer.train.device import Device

HOPELESS_MEMORY = 1.25  # multiple of the free memory; a plan may be a third too large
HOPELESS_RATE, HIGH_RATE, LOW_RATE = 1.0, 0.1, 1e-7  # matrices are initialised with a standard deviation near 0.02
SAMPLED_RATES = 1000  # steps at which a user's schedule is evaluated
SAMPLE_VOCABULARY = 600  # vocabulary size of the tokenizer that is tried before the real one is trained


def check(
    recipe: Recipe, run: RunDirectory, reference: str, exports: bool = False, is_trial: bool = False, restarts: bool = False,
) -> None:  # fmt: skip
    """Raise InputError for a recipe that cannot be trained as it is.

    Args:
        recipe: The recipe as given.
        run: Its run directory.
        reference: File or name that the recipe was loaded from.
        exports: True if the model is exported at the end, so its family must be one that transformers supports.
        is_trial: True if this machine may have fewer devices than the layout needs.
        restarts: True if the training in the run directory will be removed.
    """
    require_one_horizon(recipe, run, reference)
    webhook_url(recipe.report.webhook)
    if recipe.tokenizer.path is not None:
        load_tokenizer(recipe)  # checks that it has the tokens that the objective needs
    has_begun = run.was_saved
    if has_begun and not recipe.corpus.sources:
        raise InputError(
            f"{run.path}: an imported model has no training text; to train its weights, write a recipe with [[corpus.sources]] "
            f'and train.start = "{run.path}"'
        )
    recipe = derive.filled(recipe, run, restarts=restarts)
    labels = summary.num_classes(recipe, run.tokens)
    vocabulary = summary.vocabulary_size(recipe, run.tokens)
    resolved = recipe_defaults.resolve(recipe, vocabulary, labels=labels)
    check_schedule(recipe, resolved, has_begun=has_begun)

    # Importing torch takes seconds, so it comes after all checks that do not need it.
    from bessemer.checkpoint.mirror import new_run_mirror
    from bessemer.train import optimizer as optimizers
    from bessemer.train.starting_weights import require_source
    from bessemer.train.task import config_of, require_objective
    from bessemer.train.trackers import require_trackers

    device = _require_device(resolved, 1 if is_trial else resolved.parallel.world)
    if not resolved.train.optimizer.is_built_in:
        optimizers.try_rule(resolved.train.optimizer)
    require_trackers(recipe.report.trackers)
    new_run_mirror(recipe, run)
    config = config_of(resolved, vocabulary, labels)
    if recipe.evaluate.tasks:
        _require_tasks(recipe, config)
    if (problem := export_problem(config)) and exports:
        raise InputError(problem)
    require_layout(recipe, run, device.torch_device.type)
    require_objective(resolved, config, lambda: _sample_tokenizer(resolved))
    if has_begun:
        return
    if recipe.train.start is not None:
        _require_start(recipe, RunDirectory(Path(recipe.train.start)), config)
    require_source(resolved.model.from_, config)
    if recipe.export.hf:
        _model_tokenizer(recipe)
        if not problem:
            _exported_tokenizer(resolved)


def require_layout(recipe: Recipe, run: RunDirectory, device_type: str = "cuda") -> None:
    """Raise InputError if the processes of a recipe cannot divide its model and batch on devices of a type of torch."""
    from bessemer.train.parallelize import require_trainable
    from bessemer.train.task import config_of

    vocabulary, labels = summary.vocabulary_size(recipe, run.tokens), summary.num_classes(recipe, run.tokens)
    limit = recipe_defaults.MICRO_BATCH_TOKENS_ON[device_type == "cuda"]
    resolved = recipe_defaults.resolve(recipe, vocabulary, micro_batch_tokens=limit, labels=labels)
    require_trainable(resolved.train, resolved.parallel, config_of(resolved, vocabulary, labels), device_type)


def check_schedule(recipe: Recipe, resolved: ResolvedRecipe, *, has_begun: bool = False) -> None:
    """Raise InputError for an unusable learning rate or warmup, and warn of unusual rates and unused keys.

    Args:
        recipe: The recipe as the user gave it.
        resolved: The same recipe, resolved.
        has_begun: True if the run already has checkpoints, so that its warmup is not checked again.
    """
    require_rate(resolved)
    warn_of_unused(resolved)
    if not resolved.train.schedule.is_built_in:  # a user's class that fails should fail before the training
        for step in range(0, resolved.train.steps, max(resolved.train.steps // SAMPLED_RATES, 1)):
            learning_rate_share(resolved.train.schedule, step, resolved.train.steps)
    if not has_begun and (recipe.train.minutes is None or recipe.train.steps is not None):
        require_warmup(resolved)


def _require_device(resolved: ResolvedRecipe, processes: int) -> Device:
    """Return the device of a run.

    Raises InputError if it does not support the recipe, or if the machine has fewer devices than `processes`.
    """
    from bessemer.train import device as devices
    from bessemer.train.precision import linear_of, require_torchao

    device = devices.choose(resolved.train)
    if resolved.parallel.offload and not device.is_cuda:
        raise InputError("parallel.offload: needs CUDA devices; leave it out on a CPU")
    if resolved.train.optimizer.state == "8bit":
        if not device.is_cuda:
            raise InputError("train.optimizer.state: 8bit needs a CUDA device; take fp32 on a CPU")
        require_torchao("train.optimizer.state")
    linear_of(device.precision, device.torch_device)
    devices.require_devices(device, processes)
    return device


def require_warmup(resolved: ResolvedRecipe) -> None:
    """Raise InputError if the warmup of a resolved recipe is longer than the run."""
    warmup, steps = resolved.train.schedule.warmup_steps, resolved.train.steps
    if warmup > steps:
        raise InputError(f"train.schedule.warmup_steps = {warmup} is more than the {steps} steps of the run; remove it")


def warn_of_unused(recipe: Recipe) -> None:
    """Warn of keys that are set but have no effect with the recipe's other keys."""
    optimizer, schedule = recipe.train.optimizer, recipe.train.schedule
    for section, read in ((optimizer, optimizer.rule.keys + optimizer.rest_rule.keys), (schedule, schedule.rule.keys)):
        table = f"train.{section.extension.removesuffix('s')}"
        unread = {key for kind in built_in_classes(section.extension).values() for key in kind.keys} - {*read}
        for key in sorted(unread):
            derived = (type(section).model_fields[key].default, getattr(section.rule, key, None))
            if getattr(section, key) not in derived:
                warn(f"{table}.{key} has no effect with {table}.kind = {section.kind!r}")
    if recipe.parallel.offload and not recipe.parallel.uses_fsdp:
        warn("parallel.offload has no effect without parallel.shard, whose shards it keeps in the CPU's memory")


def require_memory(plan: dict[str, Any], recipe: Recipe) -> None:
    """Raise InputError if the planned memory far exceeds the free memory, and warn if it exceeds it slightly."""
    if plan.get("fits", True):
        return
    from bessemer.train import device as devices

    needed, free = plan["memory_bytes"]["total"], devices.available_bytes(devices.choose(recipe.train))
    text = f"the training is planned to take {size(needed)}, and {size(free)} are free"
    advice = 'take a smaller model.depth or train.micro_batch, or train.recompute = "budget"'
    if needed > HOPELESS_MEMORY * free:
        raise InputError(f"train: {text}; {advice}")
    if needed > free:
        warn(f"{text}: it may be killed; {advice}")


def _require_tasks(recipe: Recipe, config: ModelConfig) -> None:
    """Raise InputError for evaluation tasks that cannot be read, or that the model cannot do."""
    from bessemer.evaluate.task_files import open_tasks

    if config.labels or not config.causal:
        raise InputError(
            f"evaluate.tasks: a model of train.objective = {recipe.train.objective} writes no answers; remove evaluate.tasks"
        )
    open_tasks(recipe.evaluate.tasks)


def require_one_horizon(recipe: Recipe, run: RunDirectory, reference: str) -> None:
    """Raise InputError if a recipe sets both `train.steps` and `train.minutes`.

    The recipe file that a run stores may have both: the requested minutes and the steps derived from them. `reference`, the
    file or name that the recipe was loaded from, tells if it is that file.
    """
    kept = Path(reference).resolve() in (run.recipe.resolve(), run.path.resolve())
    if recipe.train.steps is not None and recipe.train.minutes is not None and not kept:
        raise InputError(f"{reference}: train.steps and train.minutes exclude each other; give one of them")


def require_rate(resolved: ResolvedRecipe) -> None:
    """Raise InputError for a learning rate that cannot work, and warn of an unusual one."""
    optimizer = resolved.train.optimizer
    matrices = optimizer.muon_rate if optimizer.kind == "muon" else 1.0
    peak = optimizer.learning_rate * max(matrices, optimizer.embedding_rate)
    if LOW_RATE <= optimizer.learning_rate * matrices <= HIGH_RATE and peak < HOPELESS_RATE:
        return  # an embedding learns well at higher rates, since it starts with a standard deviation of 1
    keys = {"muon_rate": matrices, "embedding_rate": optimizer.embedding_rate}
    factors = "".join(f", times {name}" for name, factor in keys.items() if factor != 1.0)
    what = f"train.optimizer.learning_rate = {optimizer.learning_rate:g}{factors}"
    if peak >= HOPELESS_RATE:
        raise InputError(
            f"{what}: too high: each step would change weights, which start near 0.02, by about {peak:g}; {USUAL_RATES}, or "
            "leave the key out"
        )
    effect = "high that the loss may not fall" if peak > HIGH_RATE else "low that the weights hardly change"
    warn(f"{what} is so {effect}; {USUAL_RATES}")


def _model_tokenizer(recipe: Recipe) -> None:
    """Raise InputError if Bessemer and `transformers` tokenize differently with the tokenizer of the model in `model.from`.

    Does nothing if the recipe uses no such model or another tokenizer.
    """
    path, source = recipe.tokenizer.path, recipe.model.from_
    if source is None or path is None:
        return
    folder = hub.local_folder(source, weights=False)
    if tokenizer_file(path).parent.resolve() != folder.resolve():
        return
    from bessemer.model.huggingface.comparison import compare_tokenizers, framing_of, load_tokenizer

    theirs = load_tokenizer(folder)
    try:
        compare_tokenizers(theirs, Tokenizer.load_any(tokenizer_file(path)), framing_of(theirs))
    except BessemerError as error:
        raise InputError(
            f"model.from: {folder}: {error}; save what AutoTokenizer loads, or set export.hf=false"
        ) from None


def _exported_tokenizer(resolved: Recipe) -> None:
    """Raise InputError if an export of this recipe would tokenize or compute differently in `transformers` than here.

    The check exports the recipe's tokenizer, or a small one trained like it, without weights. For a model family defined by
    the user it also exports a small model.
    """
    from bessemer.export.hugging_face import ExportFiles, try_export
    from bessemer.train.task import config_of

    tokenizer = _sample_tokenizer(resolved)
    facts, end = manifest_facts(resolved, tokenizer), tokenizer.end_of_text
    with TemporaryDirectory() as folder:
        file = Path(folder, "own.json")
        write_atomic(file, tokenizer.to_json())
        files = ExportFiles(
            file, end, framing_of(resolved, tokenizer), tokenizer.mask_token, special=facts.get("special", {}),
            ends=tuple(facts.get("ends", [end])),
        )  # fmt: skip
        try:
            try_export(config_of(resolved, tokenizer.vocabulary, 0), files, file.parent)
        except BessemerError as error:
            remedy = "take another tokenizer.pattern, or " if resolved.model.code is None else ""
            raise InputError(f"model.family: {error}; {remedy}set export.hf=false") from None


def _sample_tokenizer(recipe: Recipe) -> Tokenizer:
    """Load the recipe's tokenizer or, if the recipe trains one, train a small one with the same pre-tokenizer."""
    from bessemer.model.huggingface.comparison import GATE_TEXTS

    if recipe.tokenizer.path is not None:
        return load_tokenizer(recipe)
    try:
        return train_tokenizer(recipe, GATE_TEXTS, SAMPLE_VOCABULARY)
    except TooFewIds as error:
        return train_tokenizer(recipe, GATE_TEXTS, error.supported)


def _require_start(recipe: Recipe, start: RunDirectory, config: ModelConfig) -> None:
    """Raise InputError unless the run named by `train.start` is trained and has this model and tokenizer."""
    from bessemer.checkpoint.format import load_manifest
    from bessemer.train.starting_weights import require_same_model

    if not (saved := checkpoint_steps(start.checkpoints)):
        raise InputError(f"train.start: {start.path}: it has no checkpoint; name the folder of a trained run")
    if recipe.tokenizer.path is not None and start.tokens.exists():
        tokenizer = Tokenizer.load(tokenizer_file(recipe.tokenizer.path), recipe.tokenizer.end_of_text)
        require_equal_tokenizers(start.path, tokenizer.sha256)
    try:
        trained = ModelConfig.from_dict(load_manifest(start.checkpoints / checkpoint_name(saved[-1])).facts["model"])
    except BessemerError:  # loading the checkpoint reports the damage, and may take an older one
        return
    require_same_model(start.path, trained, config)
