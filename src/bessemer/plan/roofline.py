"""The roofline of a step: what its three kinds of work compute for each byte they move, and how fast, against the device.

Williams et al. 2009 ("Roofline"): no work is faster than the smaller of the peak and of its FLOPs a byte times the bandwidth.

Legend: T tokens of a micro-batch on a device, W width, H heads, D head size, as a device holds them after tensor and context.
"""

from __future__ import annotations

from typing import Any

from bessemer.layout.flops import tokens_seen
from bessemer.plan.estimate.compute import BYTES
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.physics import PHYSICS
from bessemer.plan.estimate.step import Step
from bessemer.plan.pipeline_picture import rank_of_slowest

# FLOPs of the element-wise work, for an element of a block's stream, of its queries and keys, and of its MLP: two norms of 4 each
# and two sums; a rotation of 3; a sigmoid of 4 and two products. Rough: the work is bound by the bandwidth wherever it lies.
STREAM_FLOPS, ROTATION_FLOPS, ACTIVATION_FLOPS = 10.0, 3.0, 6.0
BACKWARD_ELEMENTWISE = 2.0
# Times that unfused attention reads or writes every score: written, softmax read and written, read by the second product; back:
# the gradient written, it and the scores read, the result written, read twice, the scores once more.
UNFUSED_FORWARD, UNFUSED_BACKWARD = 4, 7


def roofline(job: Job, step: Step) -> dict[str, Any]:
    """The device's lines and the points of a step on the device whose pipeline stage is the slowest.

    peak, best: FLOP/s of the data sheet and of the best large product; bandwidth: bytes/s; points: FLOPs and bytes of a step by
    kind, their seconds (the plan's own), FLOPs a byte and FLOP/s.
    """
    device, layout, model = job.cluster.device, job.layout, job.model
    size, m = BYTES[job.precision], job.micro_batches
    tokens = layout.micro_batch * model.sequence_length // layout.context
    mine = rank_of_slowest(step, layout)
    layers, has_head = sum(step.stages[one].layers for one in mine), len(step.stages) - 1 in mine
    heads, kv_heads = max(model.heads // layout.tensor, 1), max(model.kv_heads // layout.tensor, 1)
    mlp, wide = max(model.mlp_width // layout.tensor, 1), heads * model.head_dim
    up = mlp * (2 if model.gated else 1)
    qkv = wide + 2 * kv_heads * model.head_dim
    again = {"none": 0.0, "full": 1.0, "selective": 0.5 if job.stack.selective == "products" else 0.0}[layout.recompute]
    shapes = ((model.width, qkv), (wide, model.width), (model.width, up), (mlp, model.width))
    products = [(inner, columns, layers, 3.0 + again) for inner, columns in shapes]
    if has_head:
        products.append((model.width, model.vocabulary // layout.tensor, 1, 3.0))
    flops = {"products": sum(2.0 * m * n * times * tokens * k * c for k, c, n, times in products)}
    moved = {
        "products": sum(m * n * times * size * (tokens * (k + c) + k * c) for k, c, n, times in products),
    }
    flops["attention"], moved["attention"] = _attention(job, tokens, heads, wide, m * layers)
    each = STREAM_FLOPS * model.width + ROTATION_FLOPS * qkv + ACTIVATION_FLOPS * mlp
    flops["elementwise"] = m * layers * tokens * each * (1.0 + BACKWARD_ELEMENTWISE)
    moved["elementwise"] = (
        step.elementwise * device.bandwidth * PHYSICS.bandwidth
    )  # the plan counts them by their bytes
    seconds = {name: getattr(step, name) for name in flops}
    return {
        "device": device.name,
        "precision": job.precision,
        "peak": device.peak(job.precision),
        "best": device.best(job.precision),
        "bandwidth": device.bandwidth,
        "points": [
            {
                "name": name, "flops": flops[name], "bytes": moved[name], "seconds": seconds[name],
                "intensity": flops[name] / moved[name], "rate": flops[name] / seconds[name],
            }
            for name in flops
            if seconds[name] > 0 and moved[name] > 0
        ],
    }  # fmt: skip


def _attention(job: Job, tokens: int, heads: int, wide: int, times: int) -> tuple[float, float]:
    """FLOPs and bytes of so many blocks' attention, forward and backward.

    Flash (Dao 2023) counts the tokens that are seen and moves only its inputs and outputs; unfused computes the whole square
    and writes it out.
    """
    model, layout = job.model, job.layout
    size = BYTES[job.precision]
    flash = job.stack.attention == "flash"
    seen = sum(tokens_seen(model, layer) for layer in range(model.layers)) / model.layers
    once = 4.0 * tokens * (seen if flash else model.sequence_length) * wide
    repeated = layout.recompute == "full" or (layout.recompute == "selective" and job.stack.selective == "attention")
    stream, scores = 4.0 * size * tokens * wide, float(size) * heads * tokens * model.sequence_length
    forward = stream + (0.0 if flash else UNFUSED_FORWARD * scores)
    backward = 2 * stream + (0.0 if flash else UNFUSED_BACKWARD * scores)
    return times * once * ((3.5 if flash else 3.0) + repeated), times * (forward * (1 + repeated) + backward)
