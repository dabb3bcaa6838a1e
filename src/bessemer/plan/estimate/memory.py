"""Memory of a device at the fullest moment of a step, by part, for any job: which stage is fullest, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from bessemer.errors import InputError
from bessemer.layout.memory import waiting
from bessemer.layout.stages import Part
from bessemer.plan.estimate import own
from bessemer.plan.estimate.activations import Split, of_a_block
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.places import places, stages_each
from bessemer.plan.estimate.state import state
from bessemer.terminal import size

# Room, over the data sheet's figure. Its GB are 1e9 bytes here, while parts with HBM have nearly as many 2^30: nvidia-smi shows
# 81,251 MiB (85.2e9 bytes) of an A100's 80 GB, 81,559 MiB of an H100's, 46,068 MiB of an L40S's 48 GB, which spends some on
# error correction. So 4% of what an HBM part shows stay free, for the driver and for blocks that do not fit.
ROOM = 1.02


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at the fullest moment of a step, by part.

    place: on the pipeline, from 0; weights: those that the products read (or that are kept divided); master: wider copies of
    them, which count with the optimizer; moments: of the optimizer; activations: what waits for the backward passes of all
    micro-batches in flight, and what one block's way back takes (kinds: the same by kind); logits: with the working memory of
    the loss; buffers: gathered weights, gradients on their way, what is sent and received; slack: held by the allocator in
    blocks that nothing fits; base: device context, libraries and communicators.
    """

    place: int
    weights: int
    master: int
    gradients: int
    moments: int
    activations: int
    logits: int
    buffers: int
    slack: int
    base: int
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def optimizer(self) -> int:
        """Moments and master copies."""
        return self.master + self.moments

    @property
    def allocated(self) -> int:
        """What tensors take: torch.cuda.max_memory_allocated."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> int:
        """What the allocator takes of the device: torch.cuda.max_memory_reserved."""
        return self.allocated + self.slack

    @property
    def total(self) -> int:
        """What is gone from the device: what nvidia-smi shows."""
        return self.reserved + self.base

    def to_dict(self) -> dict[str, int]:
        """Parts by name, and total; the optimizer's with the master copies."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "slack", "base", "total")
        return {name: getattr(self, name) for name in names}


def memory(job: Job) -> Memory:
    """The fullest stage of a job. Raises InputError where the layout cannot be (more stages than blocks)."""
    return max((_of(job, part) for part in _contenders(job)), key=lambda found: found.total)


def stages(job: Job) -> list[Memory]:
    """Each place of the pipeline, all stages on it together."""
    return [_of(job, part) for part in places(job.model, job.layout, job.stack.keeps.cut)]


def _contenders(job: Job) -> tuple[Part, ...]:
    """Places one of which is the fullest."""
    return _unmatched(places(job.model, job.layout, job.stack.keeps.cut))


@lru_cache(maxsize=4096)
def _unmatched(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Those that no earlier place, which has as many micro-batches in flight or more, holds at least as much as."""
    found: list[Part] = []
    for part in parts:
        if not any(
            one.blocks >= part.blocks and one.has_embedding >= part.has_embedding and one.has_head >= part.has_head
            for one in found
        ):
            found.append(part)
    return tuple(found)


def _of(job: Job, part: Part) -> Memory:
    if job.stack.name == "bessemer":
        ours = own.parts(job, part)
        slack = round(job.stack.keeps.slack * (ours.activations + ours.logits + ours.buffers))
        return Memory(
            part.place, ours.weights, 0, ours.gradients, ours.moments, ours.activations, ours.logits, ours.buffers, slack,
            round(job.stack.keeps.base_bytes),
        )  # fmt: skip
    model, layout, stack = job.model, job.layout, job.stack
    width = 4 if job.precision in ("fp32", "tf32") else 2
    split = Split(layout.tensor, layout.sequence_parallel, layout.context)
    tokens = layout.micro_batch * model.sequence_length / layout.context
    flight = waiting(layout.schedule, layout.pipeline, stages_each(layout), part.place, max(job.micro_batches, 1))
    stream = width * model.width / (layout.tensor if layout.sequence_parallel else 1)
    copies = stack.keeps.gathered and layout.tensor > 1 and layout.micro_batch > 1
    block = of_a_block(model, stack, split, width, layout.recompute, copies)
    waits = tokens * flight * part.blocks
    kinds = {kind: waits * each for kind, each in block.kept}
    if part.has_embedding and stack.dropout:
        kinds["embedding"] = tokens * flight * stream / width  # the mask of its dropout
    if part.has_head:  # what the last norm and the output product read
        kinds["head"] = 2 * tokens * stream
    logits, outputs = _loss(job, part, tokens)
    working = tokens * block.working
    kinds["backward"] = max(working - logits, 0.0)  # the blocks' way back begins where the logits were
    found = state(job, part)
    buffers = found.buffers + outputs
    if layout.pipeline > 1:  # what is received on both ways, and what was sent on
        sent = 0.0 if stack.keeps.pipes == "plain" or part.has_head else flight
        received = job.micro_batches if stack.keeps.pipes == "torch" and not part.has_head else 1
        buffers += (sent + received + 1) * tokens * stream
    activations = sum(kinds.values())
    return Memory(
        place=part.place,
        weights=round(found.weights),
        master=round(found.master),
        gradients=round(found.gradients),
        moments=round(found.moments),
        activations=round(activations),
        logits=round(logits),
        buffers=round(buffers),
        slack=round(stack.keeps.slack * (activations + logits + buffers)),
        base=round(stack.keeps.base_bytes),
        kinds={kind: round(each) for kind, each in kinds.items()},
    )


def _loss(job: Job, part: Part, tokens: float) -> tuple[float, float]:
    """Bytes of the loss at its fullest moment, and of logits kept until the step is done."""
    if not part.has_head:
        return 0.0, 0.0
    stack, layout = job.stack, job.layout
    rows = -(-job.model.vocabulary // layout.tensor)
    every = stack.keeps.pipes == "torch" and layout.pipeline > 1
    outputs = 2.0 * tokens * rows * (job.micro_batches - 1) if every else 0.0
    if stack.logits == "chunked":
        return 8 * min(float(stack.keeps.loss_chunk), tokens) * rows + 4.0 * rows * job.model.width, outputs
    each = stack.keeps.logit_bytes + (stack.keeps.split_logit_bytes if layout.tensor > 1 else 0.0)
    whole = 2.0 * job.model.width * tokens  # of the stream: what the output product reads, gathered, and its gradient
    gathered = (1 + (layout.micro_batch > 1)) * whole if stack.keeps.gathered and layout.tensor > 1 else 0.0
    scratch = 2.0 * rows * job.model.width if stack.keeps.scratch_gradients else 0.0  # of the output matrix
    return each * tokens * rows + 2 * gathered + scratch, outputs


@dataclass(frozen=True)
class Verdict:
    """Whether a job fits its device. free: bytes left, below 0 where it does not; reasons: why not, the largest part first."""

    fits: bool
    free: int
    reasons: tuple[str, ...]


def fits(job: Job, found: Memory) -> Verdict:
    """Held against the device's memory (see ROOM). Reasons name what is asked for and there, then each part that takes
    more than a tenth."""
    room = job.cluster.device.memory * ROOM
    free = round(room - found.total)
    if free >= 0:
        return Verdict(True, free, ())
    parts = {name: value for name, value in found.to_dict().items() if name != "total"}
    largest = sorted(parts, key=lambda name: parts[name], reverse=True)
    reasons = [f"{size(found.total)} on stage {found.place}, {size(-free)} more than the {size(round(room))} there are"]
    reasons += [f"{name} {size(parts[name])}" for name in largest if parts[name] > 0.1 * found.total]
    return Verdict(False, free, tuple(reasons))


def require_possible(job: Job) -> None:
    """Raises InputError, with what to change, where the layout cannot be: sizes below 1, or that do not divide what they split.

    Pipeline stages are checked where they are cut (`places.places`).
    """
    layout, model = job.layout, job.model
    for name in ("replicate", "shard", "tensor", "pipeline", "virtual", "context", "micro_batch"):
        if getattr(layout, name) < 1:
            raise InputError(f"layout.{name}: {getattr(layout, name)}; give 1 or more")
    for split, by, whole, of in (
        ("tensor", layout.tensor, model.heads, "heads"),
        ("tensor", layout.tensor, model.mlp_width, "hidden units of the MLP"),
        ("context", layout.context, model.sequence_length, "tokens of a sequence"),
    ):
        if whole % by:
            fitting = [number for number in range(1, by) if whole % number == 0]
            raise InputError(f"layout.{split}: {by} does not divide the {whole} {of}; {fitting[-1]} would")
    each = layout.data * layout.micro_batch
    if job.batch < each or job.batch % each:
        raise InputError(
            f"batch: {job.batch} sequences are no whole number of micro-batches of {layout.micro_batch} for each of the "
            f"{layout.data} parts of the batch; give a multiple of {each}, or change micro_batch or replicate x shard"
        )
