"""What the processes of a tensor group exchange in a step, by formula; what is exchanged when: docs/parallel.md."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.config import ModelConfig


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
    # A gather before attention and MLP, a reduce-scatter after; on the way back each is the other (Korthikanti et al.
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
