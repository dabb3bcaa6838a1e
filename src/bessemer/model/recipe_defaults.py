"""Derived defaults of a recipe: `model.depth` sets width, heads, learning rate, batch and length of training.

Every other default that depends on another key is derived here too, and each derived value can be overridden by its key.
The sources of the rules:

- Width: 64 x depth. The aspect ratio of 64 is in the flat valley that Kaplan et al. (2020, section 3.1, figure 5) measured
  for width / depth between 30 and 150.
- Heads: 64 elements each up to a width of 1024, 128 above (the head sizes of Llama and Qwen3).
- Experts: together as wide for a token as the MLP of a dense model of this depth, so all rules below give the same values,
  with N the parameters that a token uses. None of them was fitted to mixtures of experts.
- Learning rate: 0.3118 C^-0.1250, with C the FLOPs of the run (Bi et al. 2024, DeepSeek LLM, section 3.1). Weights that
  were trained before use a tenth of it (recipe/load.py).
- Batch: 0.2920 C^0.3271 tokens (same source), limited to the critical batch (Kaplan et al. 2020, section 5.1; it limits
  models from about 60e9 parameters), rounded to a power of two of sequences, and increased if the layout needs it.
- Validation: 4 to 10 times, and within 8% of the steps' time, where a forward pass counts as a third of a step. A run with
  `train.minutes` reads less held-out text per validation to stay within that.
- Horizon: 20 tokens per parameter (Hoffmann et al. 2022, table 3), and the training text at most `train.max_epochs` times.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from bessemer.common.errors import InputError
from bessemer.model import scaling_rules
from bessemer.model.config import ModelConfig, default_mlp_width
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config, recipe_keys
from bessemer.model.huggingface.families import family_named
from bessemer.recipe import Batches, Model, Parallel, Recipe, ResolvedModel, ResolvedRecipe, as_resolved
from bessemer.recipe.load import CONTINUED_RATE
from bessemer.recipe.model import BALANCE, idle_keys
from bessemer.recipe.train import Train
from bessemer.recipe.uses import digest_of
from bessemer.storage import hub

MICRO_BATCH_TOKENS = 8192  # fills a GPU's matrix units; more tokens only cost memory
# Keyed by is_cuda. With 1024 tokens a CPU is within 4% of its speed with 4096, for a quarter of the activations.
MICRO_BATCH_TOKENS_ON = {True: MICRO_BATCH_TOKENS, False: 1024}
NARROW_TOKENS = 2048  # in bf16 on a CPU this is 1.1 times as fast as 1024 (docs/background/cpu-step.md)
WARMUP_SHARE, WARMUP_LIMIT = 0.02, 2000
MIN_VALIDATIONS, MAX_VALIDATIONS = 4, 10
# The time of validations as a share of that of the steps, and of a forward pass as a share of that of a step.
VALIDATION_SHARE, FORWARD_SHARE = 0.08, 1 / 3
VALIDATION_TOKENS = 2_000_000
EXPERT_UNIT = 32  # a default expert_width is a multiple of it, for the hardware's tiles
CHECKPOINT_SECONDS = 30  # minimum seconds between the checkpoints of a run with train.minutes
SAVING_SHARE = 0.02  # approximate share of train.minutes that saving checkpoints takes


def resolve(
    recipe: Recipe, vocabulary: int, measured_steps: int | None = None, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    labels: int = 0, unique_tokens: int | None = None, held_out_tokens: int | None = None,
) -> ResolvedRecipe:  # fmt: skip
    """Return the recipe with every derived value filled in, for a tokenizer with `vocabulary` ids.

    `measured_steps` is the number of steps that fit into `train.minutes` on this machine. A default micro-batch has at
    most `micro_batch_tokens` tokens. `labels` are the classes of a classifier, whose output matrix counts in no token's
    FLOPs. `unique_tokens` (for `train.max_epochs`) and `held_out_tokens` are the sizes of the training and validation
    data, if known.
    """
    model = dimensions(recipe.model, vocabulary if recipe.adds_tokens else 0)
    model = model.changed(code=digest_of("model_families", model.family, model.code))
    length = recipe.tokens.sequence_length
    classes = labels if recipe.train.objective == "classify" else 0
    config = model_config(recipe.changed(model=model), vocabulary, labels=classes)
    train = recipe.train
    limit = None  # maximum number of training tokens
    if train.max_epochs is not None and unique_tokens is not None and train.tokens is None:
        limit = max(math.ceil(train.max_epochs * unique_tokens), 1)
    horizon = train.tokens or min(scaling_rules.TOKENS_PER_PARAMETER * config.active_parameters, limit or sys.maxsize)
    if train.steps is not None and train.global_batch_tokens is not None:
        horizon = train.steps * train.global_batch_tokens  # ignores a batch ramp, which is short
    flops = flops_per_token(config) * horizon
    layout = recipe.parallel
    advised = scaling_rules.advised_batch(flops, config.active_parameters, horizon)
    batch = train.global_batch_tokens or _batch(advised, length, micro_batch_tokens, layout, train.micro_batch)
    sequences = batch // length
    if train.batch_ramp is not None and train.batch_ramp.start_tokens > batch:
        raise InputError(
            f"train.batch_ramp.start_tokens: {train.batch_ramp.start_tokens} exceeds the final batch of {batch} "
            "tokens; lower it, or set train.global_batch_tokens"
        )
    first = sequences if train.batch_ramp is None else math.gcd(sequences, train.batch_ramp.start_tokens // length)
    micro = train.micro_batch or micro_batch_size(
        first, length, _micro_batch_tokens(train.precision, batch // layout.data, micro_batch_tokens), layout
    )
    batches = Batches.of(batch, micro, train.batch_ramp, length)
    steps = train.steps or measured_steps or batches.steps_for(math.ceil(horizon / length))
    if limit is not None and train.steps is None:
        steps = min(steps, batches.steps_for(math.ceil(limit / length)))
    validate_every, scored = _validations(recipe, steps, batches.tokens_before(steps), held_out_tokens)
    optimizer = train.optimizer
    filled = recipe.changed(
        model=model,
        train={
            "global_batch_tokens": batch, "steps": steps, "micro_batch": micro, "validate_every": validate_every,
            "tokens": None,  # replaced by `steps`
            "objective_code": train.objective_rule.digest,
            "schedule": {"warmup_steps": _warmup_steps(train, steps), "code": train.schedule.digest},
            "optimizer": {
                "learning_rate": optimizer.learning_rate or _learning_rate(recipe, flops, config),
                "betas": optimizer.betas or optimizer.rule.betas,
                "code": optimizer.digest,
            },
        },
        checkpoint={"every": recipe.checkpoint.every or min(math.ceil(steps / _checkpoints(train.minutes)), 1000)},
        evaluate={"max_tokens": scored},
    )  # fmt: skip
    return as_resolved(filled, ResolvedRecipe)


def _warmup_steps(train: Train, steps: int) -> int:
    warmup = train.schedule.warmup_steps
    return max(min(int(steps * WARMUP_SHARE), WARMUP_LIMIT), 1) if warmup is None else warmup


def _checkpoints(minutes: float | None) -> int:
    """Return the number of checkpoint intervals of a run that `train.minutes` limits to `minutes` (None: no limit).

    It is 10, or fewer (at least 2) so that each interval has at least 30 seconds and saving takes a small share of the
    time.
    """
    return 10 if minutes is None else min(max(round(60 * minutes / CHECKPOINT_SECONDS), 2), 10)


def _validations(recipe: Recipe, steps: int, tokens: int, held_out_tokens: int | None) -> tuple[int, int]:
    """Return (steps between validations, maximum tokens of a validation) for a run of `steps` steps and `tokens` tokens.

    `held_out_tokens` is the number of tokens held out for validation; None if unknown.
    """
    train, scored = recipe.train, recipe.evaluate.max_tokens
    budget = int(VALIDATION_SHARE / FORWARD_SHARE * tokens)
    whole = min(scored or VALIDATION_TOKENS, held_out_tokens or VALIDATION_TOKENS)
    count = min(max(budget // whole, MIN_VALIDATIONS), MAX_VALIDATIONS)
    every = train.validate_every or math.ceil(steps / count)
    if scored is None and train.minutes is not None:
        scored = min(max(budget * every // steps, recipe.tokens.sequence_length), VALIDATION_TOKENS)
    return every, scored or VALIDATION_TOKENS


def validation_share(resolved: ResolvedRecipe, held_out_tokens: int | None) -> float:
    """Return the estimated time of all validations divided by that of all training steps.

    A validation scores at most `held_out_tokens` tokens, the size of the held-out set. If that is None (unknown), the
    result is 0, except for a run with `train.minutes`, which scores `evaluate.max_tokens`.
    """
    train, scored = resolved.train, resolved.evaluate.max_tokens
    tokens = min(scored, held_out_tokens if held_out_tokens is not None else scored if train.minutes else 0)
    return FORWARD_SHARE * tokens / (train.validate_every * train.global_batch_tokens)


def dimensions(model: Model, ids: int = 0) -> ResolvedModel:
    """Fill in every dimension of the [model] table, from its depth or from the model that it starts from.

    Args:
        model: The [model] table of the recipe.
        ids: Number of ids of the tokenizer if tokens were added, else 0. The embedding of the model that the recipe
            starts from grows to this number of rows.

    Raises:
        InputError: The table has neither a size nor a model to start from.
    """
    if model.from_ is not None:
        name = model.from_.removeprefix("hf:")
        if not hub.is_name(name):
            return _imported(model, Path(name), ids)
        folder = hub.fetch_model(name, weights=False)
        return _imported(model.changed(from_=f"hf:{hub.pinned(name, folder)}"), folder, ids)
    depth = model.depth or model.layers
    if depth is None:
        raise InputError(
            "model: the recipe sets no size, and there is no corpus to derive one from; set model.depth, or build the "
            "corpus first with `bessemer corpus RECIPE`"
        )
    width = model.width or 64 * depth
    head_dim = model.head_dim or (width // model.heads if model.heads else 64 if width <= 1024 else 128)
    heads = model.heads or max(width // head_dim, 1)
    sizes = {"layers": model.layers or depth, "width": width, "heads": heads, "kv_heads": model.kv_heads or heads}
    options = family_named(model.family).standard | model.model_dump(exclude_none=True) | sizes
    model.require_fitting(options)
    hidden = model.mlp_width or default_mlp_width(width, options["gated"])
    sizes |= {"head_dim": head_dim} | ({} if "mlp_width" in idle_keys(options) else {"mlp_width": hidden})
    if experts := options["experts"]:
        active = min(options["experts_per_token"], experts)
        units = round(hidden / (active + options["shared_experts"]) / EXPERT_UNIT)
        each = model.expert_width or max(units, 1) * EXPERT_UNIT
        sizes |= {"experts_per_token": active, "expert_width": each}
    return as_resolved(model.changed(**sizes), ResolvedModel)


def _imported(model: Model, folder: Path, ids: int) -> ResolvedModel:
    """Return the dimensions and options of the model in `folder`, from which the recipe starts.

    The embedding has at least `ids` rows. Raises InputError if the recipe sets an option to another value; only the
    options that balance experts may differ.
    """
    family_named(model.family)  # loads the class, which may be the one that reads the folder
    imported, requested = recipe_keys(folder), model.model_dump(mode="json", exclude_none=True)
    imported["vocabulary"] = max(imported["vocabulary"], ids)
    for key in [key for key in imported if key in model.model_fields_set and key in requested]:
        if key in BALANCE:
            imported[key] = requested[key]
        elif requested[key] != imported[key]:
            raise InputError(f"model.{key}: {requested[key]} differs from {imported[key]} in {folder}; remove the key")
    model.require_fitting(requested | imported)
    unused = idle_keys(requested | imported)  # of an imported option that the recipe changes
    read = Model.model_validate({key: x for key, x in imported.items() if x is not None and key not in unused})
    return as_resolved(model.changed(**{key: getattr(read, key) for key in imported}), ResolvedModel)


def _learning_rate(recipe: Recipe, flops: float, config: ModelConfig) -> float:
    """Return the peak learning rate for a run of `flops` FLOPs.

    If trained weights are trained further (and not only a new head on them), it is CONTINUED_RATE times the rate of their
    first training, which is assumed to have had 20 tokens per parameter.
    """
    kind = recipe.train.optimizer.rule.rate
    if not recipe.is_continued or recipe.train.is_frozen:
        return float(f"{kind * scaling_rules.learning_rate(flops):.4g}")
    whole = max(flops, flops_per_token(config) * scaling_rules.TOKENS_PER_PARAMETER * config.active_parameters)
    return float(f"{kind * CONTINUED_RATE * scaling_rules.learning_rate(whole):.4g}")


def _batch(advised: float, length: int, tokens: int, layout: Parallel, micro_batch: int | None) -> int:
    """Return the default global batch in tokens: the power of two of sequences nearest to `advised` tokens, or more.

    It is larger if the layout cannot divide that batch over data-parallel ranks and micro-batches.

    Args:
        advised: Recommended batch in tokens.
        length: Tokens of a sequence.
        tokens: Maximum tokens of a micro-batch if `micro_batch` is None.
        layout: The parallel layout.
        micro_batch: Sequences of a micro-batch if the recipe sets them.
    """
    sequences = 1 << max(round(math.log2(advised / length)), 0)
    each = max(-(-sequences // layout.data), layout.min_micro_batches)
    while not _micro_batch_sizes(each, length, tokens, layout, micro_batch):
        each += 1
    return length * each * layout.data


def _micro_batch_tokens(precision: str, batch: int, tokens: int) -> int:
    """Return the maximum tokens of a micro-batch: `tokens`, or more for bf16 on a CPU.

    There, small micro-batches spend most of their time between the matmuls. `batch` is the tokens of a data-parallel
    rank's batch, at most half of which is one micro-batch, because two run concurrently (train/engine.py).
    """
    is_narrow = precision == "bf16" and tokens == MICRO_BATCH_TOKENS_ON[False]
    return max(min(NARROW_TOKENS, batch // 2), tokens) if is_narrow else tokens


def micro_batch_size(sequences: int, length: int, tokens: int, layout: Parallel) -> int:
    """Return the number of sequences in a micro-batch, for a global batch of `sequences` sequences of `length` tokens.

    It is the largest divisor of a data-parallel rank's sequences that holds at most `tokens` tokens and leaves the
    pipeline a number of micro-batches that its schedule can run; 1 if there is none.
    """
    return max(_micro_batch_sizes(max(sequences // layout.data, 1), length, tokens, layout), default=1)


def _micro_batch_sizes(
    each: int, length: int, tokens: int, layout: Parallel, requested: int | None = None
) -> list[int]:
    """Return the micro-batch sizes, in sequences, in which a layout can run `each` sequences per data-parallel rank.

    Only sizes of at most `tokens` tokens count, or only the size `requested` if that is set. `length` is the tokens of
    a sequence.
    """
    sizes = [requested] if requested else range(1, max(min(each, tokens // length), 1) + 1)
    return [size for size in sizes if layout.runs_batch(each * layout.data, size)]
