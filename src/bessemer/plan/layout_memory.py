"""Memory of one process of a run that is split over several: the parts of plan/cost.py, each divided by what divides it.

Held against a simulation of the run (train/simulate.py, `bessemer plan RECIPE --simulate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bessemer.model.config import ModelConfig
from bessemer.plan.cost import (
    HEAP_SLACK_BYTES,
    HEAP_SLACK_SHARE,
    Memory,
    kept_by_a_block,
    loss_chunk,
    mask_bytes,
    score_bytes,
)
from bessemer.plan.cost import kept as kept_when_recomputed
from bessemer.plan.state_bytes import average_bytes, optimizer_bytes
from bessemer.recipe import Batches, Parallel, Recipe


@dataclass(frozen=True)
class Part:
    """What a process of the pipeline axis holds of the model. place: on that axis, from 0; blocks: their number."""

    place: int
    blocks: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Held:
    """Parameters of a process's part of the model, after tensor parallelism and before ZeRO. block: of one block; root: of
    all that lies in none."""

    block: int
    root: int
    blocks: int

    @property
    def all(self) -> int:
        return self.blocks * self.block + self.root

    @classmethod
    def of(cls, config: ModelConfig, part: Part, tensor: int) -> Held:
        """Matrices are divided over the tensor group; vectors, and what has no row of its own for an id, are not."""
        outside = config.parameters - config.layers * config.block_matrix_parameters - config.embedding_parameters
        vectors = outside // (
            config.layers + 1
        )  # norms and biases, those outside of blocks as if they were of one more
        tables = part.has_embedding + (part.has_head and not (config.tie_embeddings and part.has_embedding))
        table = -(-config.vocabulary // tensor) * config.width
        rest = (tables * table) + (vectors if part.has_head else 0)
        return cls(config.block_matrix_parameters // tensor + vectors, rest, part.blocks)


def memory(
    recipe: Recipe,
    config: ModelConfig,
    parts: Sequence[Part],
    *,
    bytes_per_activation: int,
    bytes_per_cast: int,
    base: int,
    recomputed: int,
    is_cuda: bool,
) -> Memory:
    """The fullest process of a resolved recipe's layout, at the peak of a step; arguments as of `cost.memory`.

    parts: of each place of the pipeline. `casts` are whole copies of weights, in the type of the products: those that FSDP2
    gathers, or those that autocast makes.
    """
    planned = (
        _of_part(
            recipe, config, part, bytes_per_activation=bytes_per_activation, bytes_per_cast=bytes_per_cast, base=base,
            recomputed=recomputed, is_cuda=is_cuda,
        )
        for part in parts
    )  # fmt: skip
    return max(planned, key=lambda found: found.total)


def ways(layout: Parallel) -> int:
    """Processes that divide weights, gradients and optimizer among them: FSDP2 counts those of a context group too."""
    return layout.shard * layout.context


def in_flight(layout: Parallel, place: int, micro_batches: int) -> float:
    """Micro-batches whose activations a process of the pipeline holds at the most, all of its stages together counted as one."""
    return waiting(layout.schedule, layout.pipeline, layout.stages_each, place, micro_batches)


@lru_cache(maxsize=4096)
def waiting(schedule: str, stages: int, virtual: int, place: int, micro_batches: int) -> float:
    """in_flight of a place of a pipeline of so many processes, with `virtual` stages on each.

    All of them in GPipe (Huang et al. 2019); one for each stage from here on in 1F1B (Narayanan et al. 2021, section 2.2.1),
    with (p - 1) / (p v) as many again where v stages are interleaved (there, section 2.2.2); p in a V (Qi et al. 2024).
    """
    if stages == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "1f1b":
        most = float(stages - place)
    elif schedule == "interleaved":
        most = (2 * (stages - place - 1) + (virtual - 1) * stages + 1) / virtual
    else:
        most = stages + 0.5
    return min(most, float(micro_batches))


def state_bytes(layout: Parallel, held: Held, narrow: int, micro_batches: int) -> tuple[int, int, int]:
    """Weights, whole copies of them, and gradients of a process, with the buffers in which they are gathered and divided.

    narrow: bytes of a gathered weight. What is kept is 4 bytes each, divided by N (Rajbhandari et al. 2020, "ZeRO", section
    5: P_os, P_os+g, P_os+g+p); but where there the weights of stages 1 and 2 are whole, here fp32 masters are divided and a
    narrow copy is whole while a step lasts.
    """
    divided, n = uses_fsdp(layout), ways(layout)
    kept = 4 * held.all // n
    if not divided:
        return kept, 0, kept
    two = min(2, held.blocks) * held.block  # one in use, one on its way
    whole = held.all if layout.zero < 3 else held.root + two
    buffer = 4 * (held.block if held.blocks else held.root)  # of the block that is being added up
    # Gradients of a block and of what lies outside of blocks are whole until they are added up.
    fresh = narrow * (held.block + held.root // 2)
    if layout.zero == 1 and micro_batches > 1:
        # A block's weights are given back for the buffer.
        return kept, narrow * whole, 4 * held.all + buffer - narrow * held.block
    return kept, narrow * whole, kept + buffer + fresh


def uses_fsdp(layout: Parallel) -> bool:
    """Whether FSDP2 adds the gradients up: wherever there is more than one part of the batch, but for plain copies."""
    copies = layout.replicate > 1 and ways(layout) * layout.tensor * layout.pipeline == 1
    return layout.data * layout.context > 1 and not copies


def _of_part(
    recipe: Recipe, config: ModelConfig, part: Part, *, bytes_per_activation: int, bytes_per_cast: int, base: int,
    recomputed: int, is_cuda: bool,
) -> Memory:  # fmt: skip
    train, layout = recipe.train, recipe.parallel
    assert train.micro_batch is not None, "the recipe is resolved"
    micro_batches = Batches.of(recipe).full // layout.data // train.micro_batch
    held = Held.of(config, part, layout.tensor)
    weights, copies, gradients = state_bytes(layout, held, bytes_per_cast or 4, micro_batches)
    share = held.all / ways(layout) / config.parameters
    tokens = train.micro_batch * config.sequence_length // layout.context
    activations, working = activation_bytes(
        config, part, tokens, in_flight(layout, part.place, micro_batches), bytes_per_activation, recomputed,
        train.recompute, layout.tensor, mask_bytes(train.dropout, config),
    )  # fmt: skip
    working += score_bytes(recipe, config)
    logits = 0
    if part.has_head and not config.labels:
        rows = -(-config.vocabulary // layout.tensor)
        chunk = min(loss_chunk(train.loss_chunk, rows, is_cuda), tokens)
        logits = 2 * 4 * chunk * rows + 4 * rows * config.width
    activations += max(working - logits, 0)  # the blocks' way back begins where the logits were
    whole = max(part.blocks - recomputed, 0)
    casts = copies if uses_fsdp(layout) else whole * config.block_matrix_parameters // layout.tensor * bytes_per_cast
    optimizer = 0 if is_cuda and train.optimizer.offload else round(optimizer_bytes(train, config) * share)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        average=round(average_bytes(train, config) * share),
        activations=activations,
        logits=logits,
        base=base,
        casts=casts,
        slack=0 if is_cuda else HEAP_SLACK_BYTES + int(HEAP_SLACK_SHARE * (gradients + activations + logits)),
    )


def activation_bytes(
    config: ModelConfig, part: Part, tokens: int, waiting: float, width: int, recomputed: int, recompute: str, tensor: int,
    masks: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """Bytes that the backward passes of the micro-batches in flight wait with, and what one block takes on its way back.

    tokens: of a micro-batch, on this process; waiting: micro-batches in flight; width: bytes of an element; masks: bytes a
    token that a block keeps of dropout's masks.
    Between the products each process of a tensor group has its tokens' part of the residual stream, inside of them all
    tokens of its heads and hidden units (Korthikanti et al. 2022, section 4.2.2); what it gathered as their input is kept.
    """
    again = min(recomputed, part.blocks)
    entry = config.width / tensor  # the residual stream
    gathered = 2 * config.width * (tensor > 1)
    block = (kept_by_a_block(config) + masks / width) / tensor + gathered
    keeps = kept_when_recomputed(recompute, config) / tensor
    waits = again * keeps + (part.blocks - again) * block + 2 * entry
    widest = (3 if config.gated else 2) * config.mlp_width / tensor
    # Norms of narrow streams work in fp32 and keep that; gradients of the hidden units and of the stream come on the way back.
    working = (block if again else 0) * width + widest * width + 2 * entry * 6 * (width < 4) + 2 * config.width * width
    return round(tokens * waiting * waits * width), round(tokens * working)
