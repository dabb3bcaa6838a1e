"""What the processes of a run send each other in a step, in bytes, by formula: tensor groups, pipelines, and all together."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel


@dataclass(frozen=True)
class Exchanged:
    """Bytes of the whole tensors that collectives of each kind work on: what a gather gives, what a reduce-scatter takes."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    def __add__(self, other: Exchanged) -> Exchanged:
        return Exchanged(
            self.all_gather + other.all_gather,
            self.reduce_scatter + other.reduce_scatter,
            self.all_reduce + other.all_reduce,
        )

    def times(self, count: int) -> Exchanged:
        """The same, so many times."""
        return Exchanged(self.all_gather * count, self.reduce_scatter * count, self.all_reduce * count)

    def sent(self, processes: int) -> float:
        """Bytes that each process sends by ring algorithms: (n - 1) / n of a tensor that is gathered or reduce-scattered,
        twice that of one that is all-reduced (Thakur et al. 2005, section 4)."""
        return (self.all_gather + self.reduce_scatter + 2 * self.all_reduce) * (processes - 1) / processes


@dataclass(frozen=True)
class TensorTraffic:
    """A step's exchanges by part. layers: of all blocks; embedding: its result, and the gradient's way back; hidden: the
    last norm's result, for the loss; loss: the softmax over the split vocabulary; gradients: of what every process has in
    full, once a step."""

    layers: Exchanged
    embedding: Exchanged
    hidden: Exchanged
    loss: Exchanged
    gradients: Exchanged

    @property
    def total(self) -> Exchanged:
        """Of all parts."""
        return self.layers + self.embedding + self.hidden + self.loss + self.gradients


def tensor_bytes(
    config: ModelConfig,
    tensor: int,
    tokens: int,
    targets: int,
    *,
    bytes_per_activation: int = 4,
    bytes_per_sum: int = 4,
    label_smoothing: bool = False,
    recomputed: int = 0,
) -> TensorTraffic:
    """What the `tensor` processes of a group exchange in a step of `tokens` tokens, `targets` of them through the loss.

    bytes_per_activation: of the residual stream; bytes_per_sum: of sums, and of a weight's gradient; recomputed: blocks
    whose forward pass is computed again, in full or selectively. Tokens are those of this group, all micro-batches together.
    """
    if tensor == 1:
        none = Exchanged()
        return TensorTraffic(none, none, none, none, none)
    stream = tokens * config.width * bytes_per_activation
    squares = 2 * tokens * bytes_per_sum if config.qk_norm == "full" else 0  # one sum a token for queries, one for keys
    # A gather before attention and MLP, a reduce-scatter after; in the backward pass each becomes the other (Korthikanti et al.
    # 2022, section 4.2.2).
    layer = Exchanged(4 * stream, 4 * stream, 2 * squares)
    # Computing again stops at what the backward pass needs, which the MLP's result is not unless a norm follows it.
    scattered = 2 if config.norm_follows else 1
    again = Exchanged(2 * stream, scattered * stream, squares)
    numbers = 3 if label_smoothing else 2
    loss = 0 if config.labels else targets * (1 + numbers) * bytes_per_sum
    return TensorTraffic(
        layers=layer.times(config.layers) + again.times(recomputed),
        embedding=Exchanged(stream, stream),
        hidden=Exchanged(stream, 0 if config.labels else stream),
        loss=Exchanged(all_reduce=loss),
        gradients=Exchanged(all_reduce=_whole_parameters(config) * bytes_per_sum),
    )


def _whole_parameters(config: ModelConfig) -> int:
    """Parameters that every process of a group has in full and each has a summand of the gradient of."""
    block = config.block_matrix_parameters + config.joint_bias_parameters
    matrices = 1 if config.tie_embeddings or config.labels else 2
    cut = config.layers * block + config.vocabulary * config.width * matrices
    return config.parameters - cut - config.classifier_parameters


@dataclass(frozen=True)
class PipelineBytes:
    """Bytes of a step, over one pipeline (the processes along the pipeline axis).

    forward: hidden states; backward: their gradients; tied: the gradient of a matrix that the first and the last stage
    both have, as each of the two sends it.
    """

    forward: int
    backward: int
    tied: int

    @property
    def total(self) -> int:
        """All that the processes send: of a tied gradient's all-reduce both send it once."""
        return self.forward + self.backward + 2 * self.tied


def crossings(layout: Parallel) -> int:
    """How often a micro-batch passes from one process to another on its way through the stages.

    Once fewer than there are stages; in a V the two stages at its bottom lie on one process.
    """
    if layout.pipeline == 1:
        return 0
    between = layout.pipeline * layout.stages_each - 1
    return between - layout.is_v_shaped


def pipeline_bytes(
    config: ModelConfig,
    layout: Parallel,
    tokens: int,
    bytes_per_activation: int,
    bytes_per_gradient: int = 4,
    matrix_share: float = 1.0,
) -> PipelineBytes:
    """Bytes sent for `tokens` tokens that one pipeline reads in a step, in forward and backward passes.

    tokens: those of its hidden states, fewer where sequences are divided; bytes_per_gradient: of a weight's gradient;
    matrix_share: of the tied matrix that a process holds, 1 / (tensor x shard) where it is divided so.
    """
    each = crossings(layout) * tokens * config.width * bytes_per_activation
    is_tied = config.tie_embeddings and not config.labels and layout.pipeline > 1
    apart = is_tied and not layout.is_v_shaped
    matrix = round(config.vocabulary * config.width * bytes_per_gradient * matrix_share)
    return PipelineBytes(each, each, matrix if apart else 0)


@dataclass(frozen=True)
class Bytes:
    """Of an element. activation: of hidden states, keys and values; gathered: of weights as they are gathered; gradient: of
    weights' gradients as they are added up; sums: of the loss's sums."""

    activation: int
    gathered: int
    gradient: int
    sums: int


@dataclass(frozen=True)
class GroupParameters:
    """Parameters on a process of a tensor group, all stages of a pipeline together. outside: of no block."""

    blocks: int
    outside: int

    @property
    def all(self) -> int:
        """Both."""
        return self.blocks + self.outside


def held(config: ModelConfig, layout: Parallel) -> GroupParameters:
    """What one process of a tensor group has; a tied matrix counts twice where two stages have it."""
    cut = config.layers * (config.block_matrix_parameters + config.joint_bias_parameters)
    matrices = 1 if config.tie_embeddings or config.labels else 2
    tables = matrices * config.vocabulary * config.width
    outside = config.parameters - config.layers * _block(config)
    copies = int(_apart(config, layout)) * config.vocabulary * config.width
    each = layout.tensor
    blocks = config.layers * _block(config)
    return GroupParameters(blocks - cut + cut // each, outside - tables + (tables + copies) // each)


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
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "send"), 0.0)
    # Data: every tensor rank of every part of the batch, all its stages together.
    several, share = parts * layout.tensor, (ways - 1) / ways
    gathers = (2 * own.blocks + own.outside) * micro_batches if layout.zero == 3 else own.all
    sent["all_gather"] += several * share * gathers * of.gathered
    sent["reduce_scatter"] += several * share * own.all * of.gradient * (1 if layout.zero == 1 else micro_batches)
    copies = 2 * (layout.replicate - 1) / layout.replicate
    sent["all_reduce"] += several * copies * own.all * of.gradient / ways
    # Tensor: the tokens of all groups together; the gradients of what each process has in full, for each group, whole and
    # before they are divided: FSDP2 adds them up itself, whenever it reduces, in the type of what it gathered.
    tensor = tensor_bytes(
        config, layout.tensor, tokens, targets, bytes_per_activation=of.activation, bytes_per_sum=of.sums,
        recomputed=recomputed,
    )  # fmt: skip
    tied_up = tensor.layers + tensor.embedding + tensor.hidden + tensor.loss
    sent["all_gather"] += (layout.tensor - 1) * tied_up.all_gather
    sent["reduce_scatter"] += (layout.tensor - 1) * tied_up.reduce_scatter
    each_time = parts > 1 and layout.zero > 1 and not layout.is_v_shaped
    reductions = micro_batches if each_time else 1
    element = of.gathered if parts > 1 else of.gradient
    whole = tensor.gradients.all_reduce * element / of.sums * parts * reductions
    sent["all_reduce"] += 2 * (layout.tensor - 1) * (tied_up.all_reduce + whole)
    # Context: keys and values of all groups' tokens; their gradients in the backward pass.
    keys = 2 * config.kv_heads * config.head_dim * tokens * of.activation * (layout.context - 1)
    sent["all_gather"] += (config.layers + recomputed) * keys
    sent["reduce_scatter"] += config.layers * keys
    # Pipeline: hidden states of all pipelines' tokens, and the tied matrix's gradient in each pipeline.
    stages = pipeline_bytes(config, layout, tokens, of.activation, of.gradient)
    sent["send"] += stages.forward + stages.backward
    sent["all_reduce"] += 2 * stages.tied * parts / ways
    return {kind: round(value) for kind, value in sent.items() if value}


def _block(config: ModelConfig) -> int:
    """Parameters of one block."""
    fewer = config.with_changes(layers=config.layers + 1)
    return fewer.parameters - config.parameters


def _apart(config: ModelConfig, layout: Parallel) -> bool:
    tied = config.tie_embeddings and not config.labels
    return tied and layout.pipeline > 1 and not layout.is_v_shaped
