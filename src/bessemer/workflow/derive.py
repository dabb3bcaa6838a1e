"""Derivation of the recipe values that depend on the corpus and the machine (rules: workflow/sizing.py).

The measurements that values were derived from are recorded in the run directory, so the values stay the same until the run
has a recipe.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

from bessemer.common.console import counted, rate, say, size, warn
from bessemer.common.errors import InputError
from bessemer.model import recipe_defaults
from bessemer.model.flops import flops_per_token
from bessemer.plan import local_plan
from bessemer.recipe import Recipe, ResolvedRecipe, Train
from bessemer.recipe.load import MIN_TEXT_BYTES, comments
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json_or_none, stage_facts, write_json
from bessemer.storage.path import published_folder
from bessemer.tokens import summary
from bessemer.tokens.documents import corpus_statistics, held_out_share
from bessemer.workflow import resume_policy, sizing
from bessemer.workflow.sizing import Basis, Choice

GPU_UTILISATION = 0.15  # share of a GPU's peak that small models reach; a CPU is timed instead
PROBE_SECONDS = 2.0  # seconds of training steps of a small model, to time a CPU
PROBE = {
    "run": {"name": "probe"}, "tokens": {"sequence_length": 256}, "model": {"depth": 2},
    "train": {"steps": 1, "global_batch_tokens": 1024, "micro_batch": 4},
}  # fmt: skip
PROBE_VOCABULARY = 1024


def filled(
    recipe: Recipe, run: RunDirectory, *, record: bool = False, show: bool = False, ids: int = 0, restarts: bool = False
) -> Recipe:
    """Return the recipe with the values filled in that follow from the size of its text, such as the model's depth.

    The size is that of the built corpus if there is one, else that of the raw files. If the run has checkpoints, the values
    come from the recipe that it was trained with.

    Args:
        recipe: The recipe as the user gave it.
        run: Its run directory.
        record: True to write the measurements to basis.json and, if they changed, print each derived value with its reason.
        show: True to print each derived value with its reason without writing anything.
        ids: Largest vocabulary size that the text supports, from a tokenizer training that needed fewer ids; 0: unknown.
        restarts: True to ignore the run's checkpoints, because the training will be removed.
    """
    if not restarts and checkpoint_steps(run.checkpoints) and (stored := resume_policy.stored_recipe(run)) is not None:
        return resume_policy.resumed(recipe, stored)
    old = _recorded(run)
    start = None if recipe.model.from_ is None else recipe_defaults.dimensions(recipe.model.changed(vocabulary=None))
    width, positions = (0, 0) if start is None else (start.width, start.max_positions or 0)
    is_known = not run.tokens.exists() and (record or (show and _bytes_here(recipe) > 0))
    if old is None and recipe.model.has_size and not is_known:
        # Nothing is known about its text.
        if positions and "sequence_length" not in recipe.tokens.model_fields_set:
            return recipe.changed(tokens={"sequence_length": min(recipe.tokens.sequence_length, positions)})
        return recipe
    basis, corpus = _basis(recipe, run, old)
    if corpus and basis.text_bytes < MIN_TEXT_BYTES and not recipe.model.has_size:
        few = f"corpus.sources: {size(basis.text_bytes)} of clean text are too little to derive a model"
        raise InputError(f"{few}; give {size(MIN_TEXT_BYTES)}, or set model.depth")
    basis = replace(basis, width=width, positions=positions, ids=ids or basis.ids)
    resolved, choices = sizing.derive(recipe, basis)
    if show and choices:
        _show(basis, choices, is_raw=not corpus)
    if record and choices and (corpus or not recipe.corpus.sources) and (basis, corpus) != old:
        write_json(run.basis, {"corpus": corpus, "basis": asdict(basis)})
        _show(basis, choices, is_raw=False)
    return resolved


def micro_batch_tokens(recipe: Recipe) -> int:
    """Return the default maximum number of tokens in a micro-batch on this machine's device."""
    from bessemer.train import device as devices

    return recipe_defaults.MICRO_BATCH_TOKENS_ON[devices.choose(recipe.train).is_cuda]


def resolve(recipe: Recipe, vocabulary: int, labels: int = 0, steps: int | None = None, **known: int) -> ResolvedRecipe:
    """Fill in the values of a recipe that follow from the model's depth and from this machine.

    Args:
        recipe: The recipe as the user gave it.
        vocabulary: Vocabulary size of the tokenizer.
        labels: Number of classes of a classifier; 0 for other models.
        steps: Number of training steps that fit in `train.minutes`; None if unknown.
        known: `unique_tokens` and `held_out_tokens`, the numbers of training and held-out tokens, if known.
    """
    return recipe_defaults.resolve(recipe, vocabulary, steps, micro_batch_tokens(recipe), labels, **known)


def steps_of_minutes(recipe: ResolvedRecipe, minutes: float, step_seconds: float, held_out_tokens: int | None) -> int:
    """Return the number of training steps that fit in some minutes, with the time for validation and saving.

    `step_seconds` is the time of a step, and `held_out_tokens` the number of held-out tokens, None if unknown.
    """
    share = 1.0 + recipe_defaults.validation_share(recipe, held_out_tokens)
    steps = 60 * minutes * (1.0 - recipe_defaults.SAVING_SHARE) / (step_seconds * share)
    return max(recipe.batches.step_of(int(steps * recipe.batches.full)), 1)


def _recorded(run: RunDirectory) -> tuple[Basis, str] | None:
    """Return the content of basis.json: the measurements, and the digest of the corpus that they were taken from.

    None if the file is missing or damaged. The digest is "" for measurements of raw files.
    """
    facts = read_json_or_none(run.basis)
    try:
        return None if facts is None else (Basis(**facts["basis"]), facts["corpus"])
    except (KeyError, TypeError):
        warn(f"{run.basis}: damaged; text and machine are measured again")
    return None


def reasons(recipe: Recipe, run: RunDirectory) -> list[str]:
    """Return the comments for the run's recipe file: the values derived by `filled` and their reasons."""
    if checkpoint_steps(run.checkpoints):
        return comments(run.recipe)
    if (old := _recorded(run)) is None:
        return []
    return [_heading(old[0]), *map(str, sizing.derive(recipe, old[0])[1])]


def _heading(basis: Basis, is_raw: bool = False) -> str:
    text = f"{counted(basis.documents, 'file')}, before cleaning" if is_raw else counted(basis.documents, "document")
    speed = f", and about {rate(basis.flops_per_second)} in training on {basis.device}" if basis.device else ""
    return f"derived from {size(basis.text_bytes)} of text in {text}{speed}"


def _show(basis: Basis, choices: list[Choice], is_raw: bool) -> None:
    say(f"  {_heading(basis, is_raw)}:")
    for choice in choices:
        say(f"    [dim]{choice}[/]")


def expected_tokens(recipe: Recipe, run: RunDirectory) -> dict[str, int]:
    """Return the numbers of training tokens (`unique_tokens`) and held-out tokens (`held_out_tokens`).

    They are counted in the token shards if these exist, else estimated from the size of the raw files. The dict is empty if
    the raw files are not on this machine, for example when a laptop plans a run on a cluster.
    """
    if (known := summary.num_tokens(run.tokens)) or not (text_bytes := _bytes_here(recipe)):
        return known
    held_out = recipe.tokens.held_out * text_bytes
    each = sizing.bytes_per_token(summary.vocabulary_size(recipe, run.tokens))
    return {"unique_tokens": int((text_bytes - held_out) / each), "held_out_tokens": int(held_out / each)}


def _basis(recipe: Recipe, run: RunDirectory, old: tuple[Basis, str] | None) -> tuple[Basis, str]:
    """Measure the text and the machine that recipe values are derived from.

    Returns the measurements and the digest of the corpus, "" for raw files. `old` is the result of `_recorded`: its
    measurements of the machine are reused, and those of the text too if the digest is unchanged.
    """
    built = stage_facts(run.corpus).get("inputs") if recipe.corpus.sources else None
    corpus = f"{built} {recipe.tokens.seed}" if built else ""
    before = Basis(0, 0) if old is None else old[0]
    if not before.device and sizing.needs_speed(recipe):
        name, flops = _machine(recipe.train, recipe.parallel.world)
        before = replace(before, device=name, flops_per_second=flops)
    if old is not None and old[1] == corpus:
        return before, corpus
    if not corpus:
        num_bytes, documents = _raw_text(recipe)
        return replace(before, text_bytes=num_bytes, documents=documents, held_bytes=0, ids=0), ""

    totals, corpus_folder = corpus_statistics(recipe, run)["totals"], published_folder(run.corpus)
    num_bytes, documents = int(totals.get("bytes_kept") or 0), int(totals.get("documents_kept") or 0)
    share, number, held = held_out_share(
        corpus_folder / "documents", recipe.tokens.seed, sizing.held_out_bytes(num_bytes), num_bytes, documents
    )
    before = replace(before, text_bytes=num_bytes, documents=documents, ids=0)
    return replace(before, share=share, held_documents=number, held_bytes=held), corpus


def with_held_out(recipe: Recipe, run: RunDirectory, ids: int | None = None) -> Recipe:
    """Return a recipe whose held-out share follows from the size of its built corpus, unless the recipe sets the share.

    `ids`, if not None, replaces the vocabulary size.
    """
    sized = recipe.changed(model={"depth": 1}, train={"steps": 1})  # needs no measured speed
    tokens = sizing.derive(sized, _basis(sized, run, None)[0])[0].tokens
    shares = {"held_out": tokens.held_out, "held_out_from": tokens.held_out_from}
    return recipe.changed(tokens=shares, tokenizer={"vocabulary": ids or recipe.tokenizer.vocabulary})


@cache  # called by preflight before the corpus is built and again for the tokens
def _machine(train: Train, processes: int) -> tuple[str, float]:
    """Return the device name and the FLOP/s that a training step reaches over all processes."""
    from bessemer.train import device as devices
    from bessemer.train import measure
    from bessemer.train.task import config_of

    device = devices.choose(train)
    if device.is_cuda:
        flops = GPU_UTILISATION * local_plan.peak_rate(device)
    else:  # measured in training steps of a small model
        recipe = recipe_defaults.resolve(Recipe.model_validate(PROBE), PROBE_VOCABULARY)
        config = config_of(recipe, PROBE_VOCABULARY, 0)
        # The fastest step counts: a size derived while the machine was busy would stay for the whole run.
        seconds = measure.step_seconds(recipe, config, device, PROBE_SECONDS, typical=min)
        flops = flops_per_token(config) * 1024 / seconds
    return device.name, float(f"{flops * processes:.2g}")


def _bytes_here(recipe: Recipe) -> int:
    """Return the total size of a recipe's raw files in bytes; 0 if they are not on this machine."""
    try:
        return _raw_text(recipe)[0] if recipe.corpus.sources else 0
    except InputError:
        return 0


def _raw_text(recipe: Recipe) -> tuple[int, int]:
    """Return the total bytes and the number of the sources' files, before cleaning."""
    from bessemer.corpus.readers.files import find

    num_bytes = documents = 0
    for source in recipe.corpus.sources:
        files = find(source)
        total = sum(file.size for file in files)
        num_bytes, documents = num_bytes + min(total, source.max_bytes or total), documents + len(files)
    return num_bytes, documents
