"""NVIDIA's own step times in fp8 on Hopper and Blackwell, read into cases.

One rule was set with half of them: Transformer Engine's fp8 matmuls sustain their best rate over whole steps (`fp8_sustained` in
frameworks.toml). It has no constant, but the errors of the other half were known too when it was found.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from planner_models import llama3
from planner_sets import Case

from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout


def cases() -> Iterator[Case]:
    """Yield NVIDIA's table (planner_vendor.toml) as two sets.

    Assumed: no recompute, which the table does not print. Memory is not compared, since the table does not say what is kept in
    host memory.
    """
    rows = tomllib.loads(Path(__file__).with_name("planner_vendor.toml").read_text(encoding="utf-8"))["rows"]
    for number, (
        device,
        size,
        gpus,
        batch,
        micro_batch,
        sharded,
        tensor,
        pipeline,
        context,
        virtual,
        rate,
    ) in enumerate(rows):
        layout = Layout(
            shard=gpus // (tensor * pipeline * context), tensor=tensor, pipeline=pipeline, context=context, virtual=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b", zero=3 if sharded else 1, micro_batch=micro_batch,
        )  # fmt: skip
        links = ClusterSpec.of(devices.find(device), gpus)
        job = Job(llama3(size, 8192), layout, links, batch, "fp8", frameworks.find("megatron-core"))
        name = f"Megatron Bridge fp8{', scored' if number % 2 else ''}"
        yield Case(f"Bridge-{device}-{size}B", name, job, job.tokens / (rate * gpus), None, {"tokens_per_second": rate})
