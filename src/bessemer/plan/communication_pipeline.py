"""What the stages of a pipeline send each other, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel


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
    return between - 1 if layout.schedule in ("zbv", "dualpipev") else between


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
    apart = is_tied and layout.schedule not in ("zbv", "dualpipev")
    matrix = round(config.vocabulary * config.width * bytes_per_gradient * matrix_share)
    return PipelineBytes(each, each, matrix if apart else 0)
