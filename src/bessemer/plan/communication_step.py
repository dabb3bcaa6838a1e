"""What all processes of a run send each other in a step, by formula: the parts of every way to split, added up."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.config import ModelConfig
from bessemer.plan.communication_pipeline import pipeline_bytes
from bessemer.plan.communication_tensor import tensor_bytes
from bessemer.recipe import Parallel


@dataclass(frozen=True)
class Bytes:
    """Of an element. activation: of hidden states, keys and values; gathered: of weights as they are gathered; gradient: of
    weights' gradients as they are added up; sums: of the loss's sums."""

    activation: int
    gathered: int
    gradient: int
    sums: int


@dataclass(frozen=True)
class Held:
    """Parameters on a process of a tensor group, all stages of a pipeline together. outside: of no block."""

    blocks: int
    outside: int

    @property
    def all(self) -> int:
        """Both."""
        return self.blocks + self.outside


def held(config: ModelConfig, layout: Parallel) -> Held:
    """What one process of a tensor group has; a tied matrix counts twice where two stages have it."""
    cut = config.layers * (config.block_matrix_parameters + config.joint_bias_parameters)
    matrices = 1 if config.tie_embeddings or config.labels else 2
    tables = matrices * config.vocabulary * config.width
    outside = config.parameters - config.layers * _block(config)
    copies = int(_apart(config, layout)) * config.vocabulary * config.width
    each = layout.tensor
    blocks = config.layers * _block(config)
    return Held(blocks - cut + cut // each, outside - tables + (tables + copies) // each)


def step_bytes(
    config: ModelConfig, layout: Parallel, tokens: int, targets: int, micro_batches: int, of: Bytes, recomputed: int = 0
) -> dict[str, int] | None:
    """Bytes that all processes together send in a step, by kind, as a ring would (see `parallel.traffic`).

    tokens, targets: of the global batch; micro_batches: of each part of it; recomputed: blocks. Without what an optimizer
    that gathers whole matrices adds, and without label smoothing. None where the number of gathers depends on the schedule:
    stages of a pipeline that are sharded.

    Data: gradients are added up once a step (copies, zero 1) or once a micro-batch (zero 2 and 3, over `shard` and
    `context`); weights are gathered once a step (zero 1 and 2), or for each micro-batch, those of blocks again for its
    backward pass (zero 3: Rajbhandari et al. 2020, section 7.2). A ring sends (n - 1) / n of a tensor for a gather or a
    reduce-scatter, twice that for an all-reduce (Patarasuk and Yuan 2009, section 3).
    """
    ways, parts = layout.shard * layout.context, layout.data * layout.context
    if layout.pipeline > 1 and ways > 1:
        return None
    own = held(config, layout)
    told = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "send"), 0.0)
    # Data: every tensor rank of every part of the batch, all its stages together.
    several, share = parts * layout.tensor, (ways - 1) / ways
    gathers = (2 * own.blocks + own.outside) * micro_batches if layout.zero == 3 else own.all
    told["all_gather"] += several * share * gathers * of.gathered
    told["reduce_scatter"] += several * share * own.all * of.gradient * (1 if layout.zero == 1 else micro_batches)
    copies = 2 * (layout.replicate - 1) / layout.replicate
    told["all_reduce"] += several * copies * own.all * of.gradient / ways
    # Tensor: the tokens of all groups together; the gradients of what each process has in full, for each group, whole and
    # before they are divided: FSDP2 adds them up itself, whenever it reduces, in the type of what it gathered.
    tensor = tensor_bytes(
        config, layout.tensor, tokens, targets, bytes_per_activation=of.activation, bytes_per_sum=of.sums,
        recomputed=recomputed,
    )  # fmt: skip
    tied_up = tensor.layers + tensor.embedding + tensor.hidden + tensor.loss
    told["all_gather"] += (layout.tensor - 1) * tied_up.all_gather
    told["reduce_scatter"] += (layout.tensor - 1) * tied_up.reduce_scatter
    each_time = parts > 1 and layout.zero > 1 and not (layout.pipeline > 1 and layout.schedule in ("zbv", "dualpipev"))
    reductions = micro_batches if each_time else 1
    element = of.gathered if parts > 1 else of.gradient
    whole = tensor.gradients.all_reduce * element / of.sums * parts * reductions
    told["all_reduce"] += 2 * (layout.tensor - 1) * (tied_up.all_reduce + whole)
    # Context: keys and values of all groups' tokens; their gradients on the way back.
    keys = 2 * config.kv_heads * config.head_dim * tokens * of.activation * (layout.context - 1)
    told["all_gather"] += (config.layers + recomputed) * keys
    told["reduce_scatter"] += config.layers * keys
    # Pipeline: hidden states of all pipelines' tokens, and the tied matrix's gradient in each pipeline.
    stages = pipeline_bytes(config, layout, tokens, of.activation, of.gradient)
    told["send"] += stages.forward + stages.backward
    told["all_reduce"] += 2 * stages.tied * parts / ways
    return {kind: round(value) for kind, value in told.items() if value}


def _block(config: ModelConfig) -> int:
    """Parameters of one block."""
    fewer = config.with_changes(layers=config.layers + 1)
    return fewer.parameters - config.parameters


def _apart(config: ModelConfig, layout: Parallel) -> bool:
    tied = config.tie_embeddings and not config.labels
    return tied and layout.pipeline > 1 and layout.schedule not in ("zbv", "dualpipev")
