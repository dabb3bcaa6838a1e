"""Planned memory against published measurements: errors by set, and the worst cases.

    python benchmarks/planner_memory.py FOLDER [--json FILE]

FOLDER has the reference sets that planner_sets.py reads. Each set is compared by the quantity it reports: allocated tensors
(torch's peak), the allocator's peak (reserved), or all memory used on the device (nvidia-smi).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import planner_sets
import planner_vendor
from planner_sets import GIB, Case, gpt

from bessemer.common.errors import InputError
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import DeviceMemory, excess, memory, stages
from bessemer.plan.estimate.memory_parts import each

# torchtitan's metrics.py logs reserved_bytes.all.peak, SimuMax's guide max_memory_allocated; BLOOM's log names nvidia-smi. For
# nanotron's sweep it is the column "Mem Res (GB)": all 501 runs have in layouts_h100.json the value of the sweep's whole table,
# bench_final2 (public with the validation of RAPID-LLM, validation_scripts/huggingface_data), logged in units of 2^30.
REPORTED = {"torchtitan": "reserved", "B200": "allocated", "BLOOM": "total", "nanotron": "reserved"}


@dataclass(frozen=True)
class Row:
    """One comparison, in the unit of its set.

    Attributes:
        program: Framework whose profile the plan used, for sets of whole devices.
    """

    set: str
    name: str
    planned: float
    measured: float
    program: str = ""

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def as_run(case: Case) -> Job:
    """Return the case's job with the framework version that ran it.

    torchtitan compiles the loss from 2025 on. BLOOM used an optimizer for bf16 from 28 February on ("from now on the testing is
    happening with BF16 optimizer").
    """
    if case.set == "torchtitan" and "_2025" in case.raw["source"]:
        return replace(case.job, framework=frameworks.find("torchtitan-2025"))
    if case.set == "BLOOM" and case.raw["inputs"].get("Notes", "") >= "02-28":
        return replace(case.job, framework=frameworks.find("megatron-deepspeed-bf16"))
    return case.job


def peaks(cases: list[Case]) -> Iterator[Row]:
    """Yield the comparisons of the sets that report whole devices."""
    for case in cases:
        which = case.set.split()[0]
        if case.memory is None or which not in REPORTED or not case.has_memory_of_job:
            continue
        measured = case.raw["mem_gb"] * GIB if which == "nanotron" else case.memory  # logged in units of 2^30
        job = as_run(case)
        yield Row(which, case.name, getattr(memory(job), REPORTED[which]), measured, job.framework.name)


def korthikanti(cases: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the comparisons with Korthikanti et al. (2022).

    Figure 1 has the state of a stage of blocks and the activations of the first stage; figure 7 has activations as percentages of
    those with tensor parallelism alone. Both cover blocks only, without the working memory of the backward pass and the dropout
    of the embedding.
    """
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        if not {"none", "params_opt_gib"} & set(seen):
            continue
        model = gpt(inputs["hidden"], inputs["layers"], inputs["heads"], inputs["seq"], inputs["vocab"])
        virtual = inputs["interleave"]
        layout = Layout(
            replicate=inputs["dp"],
            tensor=inputs["tp"],
            pipeline=inputs["pp"],
            virtual=virtual,
            zero=0,
            schedule="interleaved" if virtual > 1 else "1f1b",
            micro_batch=inputs["micro_batch"],
            sequence_parallel=False,
        )
        device = devices.find("A100 SXM 80GB")
        cluster = ClusterSpec(device, inputs["gpus"], 8, device.intra_bandwidth, device.inter_bandwidth)
        job = Job(model, layout, cluster, inputs["global_batch"], "fp16", frameworks.find("megatron-lm-2022"))
        found = {
            "none": stages(job),
            "seq": stages(job.with_layout(sequence_parallel=True)),
            "sel": stages(job.with_layout(recompute="selective")),
            "seqsel": stages(job.with_layout(recompute="selective", sequence_parallel=True)),
            "full": stages(job.with_layout(recompute="full")),
        }
        kept = {mode: waiting(places[0]) for mode, places in found.items()}
        if "none" in seen:
            for mode in ("seq", "sel", "seqsel", "full"):
                name = f"{case['case']} {mode}"
                yield Row("Korthikanti figure 7", name, 100 * kept[mode] / kept["none"], seen[mode])
        else:
            inner = found["none"][min(1, len(found["none"]) - 1)]  # with one stage the embedding tables count too
            state = (inner.weights + inner.gradients + inner.optimizer) / GIB
            yield Row("Korthikanti figure 1", f"{case['case']} state", state, seen["params_opt_gib"])
            for mode, key in (("none", "act_gib_tp_only_no_recompute"), ("seqsel", "act_gib_sp_selective")):
                yield Row("Korthikanti figure 1", f"{case['case']} {mode}", kept[mode] / GIB, seen[key])


def waiting(found: DeviceMemory) -> int:
    """Return the bytes of the blocks' activations that are kept for backward passes."""
    return found.activations - found.kinds.get("backward", 0) - found.kinds.get("embedding", 0)


def pipeline(cases: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the comparisons with table 4 of Qi et al. 2024 (Zero Bubble).

    It used Megatron-LM of 2023, unfused attention with dropout, no ZeRO, and one block fewer on the first and last stage;
    interleaved schedules have one block per stage. Their ZB-1p and ZB-2p are not among our schedules.
    """
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        if "memory_gb" not in seen:
            continue
        model = gpt(inputs["hidden"], inputs["layers"], inputs["heads"], inputs["seq"], 51200, tie_embeddings=False)
        framework = frameworks.find("megatron-lm-2022")
        framework = replace(framework, cut="ends")
        virtual = (inputs["layers"] + 2) // inputs["pp"]
        for name, layout in (
            ("1F1B", Layout(pipeline=inputs["pp"], micro_batch=inputs["micro_batch"], zero=0)),
            (
                "1F1B-I",
                Layout(
                    pipeline=inputs["pp"],
                    virtual=virtual,
                    schedule="interleaved",
                    micro_batch=inputs["micro_batch"],
                    zero=0,
                ),
            ),
        ):
            device = devices.find("A100 SXM 80GB")
            cluster = ClusterSpec(device, inputs["gpus"], 8, device.intra_bandwidth, device.inter_bandwidth)
            batch = inputs["n_microbatches"] * inputs["micro_batch"]
            found = memory(Job(model, layout, cluster, batch, "fp16", framework))
            peak = seen["memory_gb"][name]
            yield Row("Zero Bubble table 4", f"{case['case']} {name}", found.reserved / GIB, peak, framework.name)


def zero(cases: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield the comparisons with table 1 of Rajbhandari et al. 2020, in GB of 1e9: 16-bit weights and gradients, 12 bytes of
    optimizer state.
    """
    framework = Framework("zero", gradient_bytes=2.0)
    for case in cases:
        inputs = case["inputs"]
        for stage in (1, 2, 3):
            seen = case["observed"].get(f"zero{stage}_gb")
            if seen and "params_b" in inputs:
                planned = inputs["params_b"] * sum(each(framework, stage, inputs["dp"]))
                yield Row("ZeRO table 1", f"{case['case']} stage {stage}", planned, seen)


# Textbook figures for the state of a 70B model: bytes of weights, master copies, gradients and moments; GB; number of 80 GB
# devices.
TEXTBOOK = (
    ("16-bit weights and gradients, fp32 moments", (2, 0, 2, 8), 840, None),
    ("fp32 weights and moments, 16-bit gradients", (4, 0, 2, 8), 980, 13),
    ("the same with the 16-bit working copy", (2, 4, 2, 8), 1120, 14),
)


def textbook() -> Iterator[Row]:
    for name, (weight, master, gradient, moment), expected, number in TEXTBOOK:
        framework = Framework(
            name, weight_bytes=weight, master_bytes=master, gradient_bytes=gradient, moment_bytes=moment
        )
        yield Row("textbook, 70B", name, 70 * sum(each(framework, 0, 1)), expected)
        if number is not None:
            yield Row("textbook, 70B", f"{name}: devices", math.ceil(70 * sum(each(framework, 0, 1)) / 80), number)


def verdicts(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Return per set the runs that succeeded although planned not to fit, and the failed runs that were planned to fit.

    `excess` is the planned bytes of the former over the device's data sheet, minus 1. A failed run of nanotron's sweep ran out of
    memory or failed otherwise; a row of BLOOM's table without figures ran out of memory. In the other sets every run succeeded;
    MPT's micro-batches are the largest that fit.
    """
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        which = case.set.split()[0] if case.set.split()[0] in REPORTED else case.set
        if not case.has_memory_of_job:
            continue
        if which == "nanotron":
            failed = case.raw["status"] != "ok"
        elif which == "BLOOM":
            failed = not any(case.raw["observed"].get(key) for key in ("hw_tflops_per_gpu", "iter_time_s", "mem_gb"))
        elif case.seconds is None:
            continue
        else:
            failed = False
        empty = {"ran": 0, "ran, said not to fit": [], "excess": [], "failed": 0, "failed, said to fit": []}
        into = found.setdefault(which, empty)
        job = as_run(case)
        try:
            held = memory(job)
            fitting, over = not excess(job, held), [held.total / job.cluster.device.memory - 1]
        except InputError:  # more stages than blocks
            fitting, over = False, []
        into["failed" if failed else "ran"] += 1
        if failed == fitting:
            into["failed, said to fit" if failed else "ran, said not to fit"].append(case.name)
            into["excess"] += [] if failed else over
    return found


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return the errors of a set, relative to the measurements."""
    errors = sorted(abs(row.error) for row in rows)
    worst = sorted(rows, key=lambda row: -abs(row.error))[:3]
    return {
        "n": len(rows),
        "median_signed": median(row.error for row in rows),
        "mean_absolute": mean(errors),
        "percentile_90": errors[max(-(-9 * len(errors) // 10) - 1, 0)],
        "worst": [{"name": row.name, "error": row.error} for row in worst],
    }


def compare(folder: Path) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """Return all comparisons for the sets found in the folder, and the verdicts on what fits."""
    cases = [*planner_sets.read(folder), *planner_vendor.cases()]
    rows = [*peaks(cases), *textbook()]
    for name, reader in (("activation_memory", korthikanti), ("pipeline", pipeline), ("zero", zero)):
        file = folder / f"{name}.json"
        if file.is_file():
            rows += reader(json.loads(file.read_text(encoding="utf-8"))["cases"])
    return rows, verdicts(cases)


def kept(folder: Path) -> dict[str, Any]:
    """Return the errors by set and the counts of the verdicts, as plain values."""
    rows, verdict = compare(folder)
    by_set: dict[str, list[Row]] = {}
    for row in rows:
        by_set.setdefault(row.set, []).append(row)
    counts = {
        name: {key: value if isinstance(value, int) else len(value) for key, value in found.items()}
        | {"excess": [min(found["excess"]), max(found["excess"])] if found["excess"] else []}
        for name, found in verdict.items()
    }
    return {"sets": {name: summary(of) for name, of in by_set.items()}, "fits": counts}


def show(found: dict[str, Any]) -> str:
    """Format the tables."""
    lines = [f"{'set':22} {'n':>4} {'median':>8} {'mean abs':>9} {'90 %':>7}  worst"]
    for name, one_set in found["sets"].items():
        worst = "; ".join(f"{one['name']} {one['error']:+.1%}" for one in one_set["worst"])
        figures = f"{one_set['median_signed']:+8.1%} {one_set['mean_absolute']:9.1%} {one_set['percentile_90']:7.1%}"
        lines.append(f"{name:22} {one_set['n']:4} {figures}  {worst}")
    lines += [f"fits, {name}: {counts}" for name, counts in found["fits"].items()]
    return "\n".join(lines)
