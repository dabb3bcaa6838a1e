"""Readers that turn published measurements into jobs for the planner, one for each set.

`read(folder)` returns a list of Case. Facts that a source leaves out are assumed; the reader's docstring names the assumptions.
Sets other than dense transformers with a known layout (mixtures of experts, runs without a layout) are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import planner_sweep
from planner_models import ALL_BIASES, MPT, gpt, llama, llama3, megatron_flops, padded

from bessemer.model.flops import flops_per_token
from bessemer.plan import devices
from bessemer.plan.devices import DeviceSpec
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A published measurement.

    Attributes:
        seconds: Seconds per step; None if not published.
        memory: Bytes on the fullest device; None if not published.
        raw: The record of the source.
        left_out: Reason that the case is left out; "" if it is used. With planner_sweep.BEFORE_FIX only its memory is used.
    """

    name: str
    set: str
    job: Job
    seconds: float | None
    memory: float | None
    raw: dict[str, Any]
    left_out: str = ""

    @property
    def has_memory_of_job(self) -> bool:
        """True if the measured memory, or the failure to fit, is evidence about the memory of this job."""
        return self.left_out in ("", planner_sweep.BEFORE_FIX)


def read(folder: Path) -> list[Case]:
    """Return all cases of the files found in the folder, including those left out."""
    return [
        case for name, reader in READERS.items() if (folder / name).is_file() for case in reader(_load(folder / name))
    ]


def _load(path: Path) -> list[dict[str, Any]]:
    whole = json.loads(path.read_text(encoding="utf-8"))
    rows = whole.get("rows") or whole.get("cases")
    if path.name == planner_sweep.FILE:
        rows = planner_sweep.marked(rows)
    arch = whole.get("arch")
    return [{**row, "arch": arch[str(row["model_b"])]} for row in rows] if arch else list(rows)


def cluster(device: DeviceSpec, gpus: int, inter: float | None = None) -> ClusterSpec:
    """Return a cluster of nodes of 8, or of one smaller node."""
    return ClusterSpec(device, gpus, min(8, gpus), device.intra_bandwidth, inter or device.inter_bandwidth)


# --- A100, Megatron-DeepSpeed (vTrain's ground truth) ---------------------------------------------------------------------


def step_time_a100(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield vTrain's cases: full recompute, 1F1B, 800 Gb/s per node.

    The source does not name the ZeRO stage. Assumed: none, which takes the same time as stage 1 and differs in memory only.
    """
    device = devices.find("A100 SXM 80GB")
    for row in rows:
        tensor = row["tp"]
        model = gpt(row["hidden"], row["layers"], row["heads"], row["seq"], padded(50257, tensor))
        layout = Layout(
            replicate=row["dp"], tensor=tensor, pipeline=row["pp"], micro_batch=row["micro_batch"], zero=0, recompute="full",
            sequence_parallel=False,
        )  # fmt: skip
        job = Job(
            model,
            layout,
            cluster(device, row["gpus"], 100e9 / 8),
            row["global_batch"],
            "fp16",
            frameworks.find("megatron-deepspeed"),
        )
        name = "A100 single node" if row["set"] == "single-node" else "A100 multi-node"
        yield Case(row["case"], name, job, row["iter_time_ms"] / 1e3, None, row)


# --- Megatron-LM: SC'21 and Megatron-Core on H100 --------------------------------------------------------------------------

# Micro-batch and stages per device of Table 1, which the paper does not print: from the authors' examples/sc21/run_table_1.sh in
# Megatron-LM (micro-batch; layers of a virtual stage, 0 for one stage per device), by layers and hidden size.
SC21 = {
    (24, 2304): (16, 0), (30, 3072): (16, 0), (36, 4096): (16, 0), (40, 6144): (8, 0), (48, 8192): (4, 0),
    (60, 10240): (2, 5), (80, 12288): (2, 5), (96, 16384): (1, 3), (105, 20480): (1, 1), (128, 25600): (1, 0),
}  # fmt: skip
GPT_SHAPES = {
    174.6: (96, 12288, 96),
    529.6: (105, 20480, 128),
}  # layers, hidden size, heads of Table 2 (its section 5.2)


def megatron(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of Megatron-LM (SC'21, Tables 1 and 2) and of Megatron-Core.

    The printed TFLOP/s of SC'21 include the recomputed forward pass; those of Megatron-Core are model FLOPs. Model-parallel rows
    of Table 2 use the interleaved schedule of Table 1. Megatron-Core's table prints neither micro-batch nor interleaving;
    assumed: a micro-batch of 1, and the most stages per device, up to 7, that divide its layers.
    """
    for case in cases:
        inputs, seen, name = case["inputs"], case["observed"], case["case"]
        if name.startswith(("SC21-T1", "SC21-T2")):
            yield _sc21(case, name, inputs, seen)
        elif name.startswith("MCore"):
            model = gpt(
                inputs["hidden"],
                inputs["layers"],
                inputs["heads"],
                inputs["seq"],
                inputs["vocab"],
                tie_embeddings=False,
            )
            deep = inputs["layers"] // inputs["pp"]
            virtual = max(v for v in range(1, 8) if deep % v == 0) if inputs["pp"] > 1 else 1
            layout = Layout(
                shard=inputs["dp"], tensor=inputs["tp"], pipeline=inputs["pp"], virtual=virtual, zero=1,
                schedule="interleaved" if virtual > 1 else "1f1b", recompute="selective",
            )  # fmt: skip
            device = devices.find("H100 SXM")
            job = Job(
                model,
                layout,
                cluster(device, inputs["gpus"]),
                inputs["global_batch"],
                "bf16",
                frameworks.find("megatron-core"),
            )
            flops = megatron_flops(job.batch, model, False)
            yield Case(
                name,
                "Megatron-Core H100",
                job,
                flops / (seen["model_tflops_per_gpu"] * 1e12 * inputs["gpus"]),
                None,
                case,
            )


def _sc21(case: dict[str, Any], name: str, inputs: dict[str, Any], seen: dict[str, Any]) -> Case:
    layers, hidden, heads = GPT_SHAPES.get(inputs["params_b"]) or (inputs["layers"], inputs["hidden"], inputs["heads"])
    zero3, tensor, pipeline = inputs.get("scheme") == "ZeRO-3", inputs["tp"], inputs["pp"]
    model = gpt(hidden, layers, heads, inputs["seq"], inputs.get("vocab", 51200))
    micro_batch, deep = SC21.get((layers, hidden), (1, 0))
    virtual = layers // pipeline // deep if deep and pipeline > 1 else 1
    data = inputs["gpus"] // (tensor * pipeline)
    layout = Layout(
        replicate=1 if zero3 else data, shard=data if zero3 else 1, zero=3 if zero3 else 0, tensor=tensor, pipeline=pipeline,
        virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b", micro_batch=inputs["micro_batch"] or micro_batch,
        recompute="full", sequence_parallel=False,
    )  # fmt: skip
    framework = frameworks.find("deepspeed-zero3" if zero3 else "megatron-lm-2021")
    job = Job(
        model, layout, cluster(devices.find("A100 SXM 80GB"), inputs["gpus"]), inputs["global_batch"], "fp16", framework
    )
    seconds = megatron_flops(job.batch, model, True) / (seen["hw_tflops_per_gpu"] * 1e12 * inputs["gpus"])
    table = "SC'21 Table 1" if "-T1-" in name else "SC'21 Table 2, ZeRO-3" if zero3 else "SC'21 Table 2"
    return Case(name, table, job, seconds, None, case)


# --- Papers: MT-NLG, MegaScale ---------------------------------------------------------------------------------------------


def papers(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of MT-NLG and MegaScale.

    MT-NLG: a micro-batch of 1, no interleaving (DeepSpeed's schedule). MegaScale and its Megatron-LM: a micro-batch of 1,
    selective recompute and sequence parallelism, 200 Gb/s for each GPU, where the paper does not say. Where only MFU is
    published, FLOPs follow Megatron's formula. The ablation is left out, since its variants have no sizes.
    """
    for case in cases:
        inputs, seen, name = case["inputs"], case["observed"], case["case"]
        if name.startswith("MTNLG"):
            model = gpt(inputs["hidden"], inputs["layers"], inputs["heads"], inputs["seq"], 51200)
            layout = Layout(
                shard=inputs["dp"], tensor=inputs["tp"], pipeline=inputs["pp"], recompute="full", sequence_parallel=False,
            )  # fmt: skip
            framework, table = frameworks.find("megatron-deepspeed"), "MT-NLG"
        elif name.startswith("MegaScale") and "tp" in inputs:
            model = gpt(inputs["hidden"], inputs["layers"], inputs["heads"], inputs["seq"], inputs["vocab"])
            theirs = "-MegaScale-" in name
            layout = Layout(
                shard=inputs["gpus"] // (inputs["tp"] * inputs["pp"]), tensor=inputs["tp"], pipeline=inputs["pp"],
                virtual=inputs["interleave"], schedule="interleaved", recompute="selective",
            )  # fmt: skip
            framework, table = frameworks.find("megascale" if theirs else "megatron-lm-2022"), "MegaScale"
        else:
            continue
        device = devices.find("A100 SXM 80GB")
        job = Job(model, layout, cluster(device, inputs["gpus"]), inputs["global_batch"], "bf16", framework)
        seconds = seen.get("iter_time_s") or megatron_flops(job.batch, model, False) / (
            seen["mfu_pct"] / 100 * device.peak("bf16") * inputs["gpus"]
        )
        yield Case(name, table, job, seconds, None, case)


# --- Korthikanti et al. 2022 -----------------------------------------------------------------------------------------------


def activation_memory(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the step times of Table 5 and the memory of figure 1. The record has the recompute mode."""
    for case in cases:
        inputs, seen, name = case["inputs"], case["observed"], case["case"]
        if "layers" not in inputs or not ({"iter_time_s", "params_opt_gib"} & set(seen)):
            continue
        model = gpt(inputs["hidden"], inputs["layers"], inputs["heads"], inputs["seq"], inputs["vocab"])
        virtual = inputs["interleave"]
        layout = Layout(
            replicate=inputs["dp"], tensor=inputs["tp"], pipeline=inputs["pp"], virtual=virtual, zero=0,
            schedule="interleaved" if virtual > 1 else "1f1b", micro_batch=inputs["micro_batch"],
            recompute=inputs.get("recompute", "selective"), sequence_parallel=inputs.get("sp", True),
        )  # fmt: skip
        device = devices.find("A100 SXM 80GB")
        job = Job(
            model, layout, cluster(device, inputs["gpus"]), inputs["global_batch"], "fp16", frameworks.find("megatron-lm-2022")
        )  # fmt: skip
        yield Case(name, "Korthikanti Table 5", job, seen.get("iter_time_s"), None, case)


# --- torchtitan ------------------------------------------------------------------------------------------------------------


def torchtitan(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield torchtitan's cases on H100 and H200.

    The H100 with 96 GB runs at 500 W. Assumed: matmuls slow down with the cube root of the power, as for a chip whose voltage
    follows its clock. Sequences of 8,192; selective checkpointing per operation unless the record says otherwise; the batch of a
    pipeline rank has as many micro-batches as there are ranks (torchtitan's default of 2024).
    """
    h100 = devices.find("H100 SXM")
    slowed = (5 / 7) ** (1 / 3)
    slower = replace(
        h100, name="H100 SXM 96GB, 500 W", memory=96e9, bandwidth=2.4e12, watts=500, matmul=h100.matmul * slowed,
        matmul_fp8=(h100.matmul_fp8 or 0) * slowed,
    )  # fmt: skip
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        said = " ".join(str(inputs.get(key, "")) for key in ("mode", "quant", "ac", "schedule")).lower()
        device = devices.find("H200 SXM") if "H200" in inputs["gpu"] else slower
        size = re.search(r"(\d+)B", inputs["model"])
        pipeline, local = inputs.get("pp", 1), inputs["local_batch"]
        compiled = bool(inputs.get("compile")) or "compile" in said
        layout = Layout(
            shard=inputs.get("fsdp", 1), tensor=inputs.get("tp", 1), pipeline=pipeline, context=inputs.get("cp", 1), zero=3,
            virtual=2 if "interleaved" in said else 1, schedule="interleaved" if "interleaved" in said else "1f1b",
            micro_batch=max(local // pipeline, 1), recompute="full" if inputs.get("ac") == "full" else
            "none" if inputs.get("ac") == "none" else "selective",
        )  # fmt: skip
        framework = replace(
            frameworks.find("torchtitan" if compiled else "torchtitan-eager"),
            fp8="row" if "rowwise" in said else "tensor",
        )
        for key in ("tok_s_gpu", "tok_s_gpu_vanilla", "tok_s_gpu_async"):
            if key not in seen or size is None:
                continue
            hidden = key.endswith("async") or (key == "tok_s_gpu" and "asynctp" in said)
            used = replace(framework, tensor_overlap=ASYNC_TENSOR) if hidden else framework
            job = Job(
                llama3(size[1], inputs.get("seq", 8192)), layout, cluster(device, inputs["gpus"], 50e9), local * layout.data,
                "fp8" if "fp8" in said else "bf16", used,
            )  # fmt: skip
            memory = seen["mem_gib"] * GIB if seen.get("mem_gib") else None
            name = case["case"] + key.removeprefix("tok_s_gpu").replace("_", "-")
            yield Case(name, "torchtitan", job, job.tokens / (seen[key] * inputs["gpus"]), memory, case)


# Asynchronous tensor parallelism (Wang et al. 2023): share of its communication that overlaps with matmuls. Assumed; torchtitan's
# own tables suggest less and were not used for it.
ASYNC_TENSOR = 0.6

# --- LLM Foundry's MPT -----------------------------------------------------------------------------------------------------


def mpt(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of LLM Foundry's MPT: ZeRO-3 or 2 on all GPUs.

    Assumed: 400 Gb/s for each H100, 200 for each A100 (the README has neither).
    """
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        hidden, heads, layers = MPT[inputs["model"].removeprefix("MPT-").lower()]
        device = devices.find(inputs["gpu"])
        layout = Layout(
            shard=inputs["gpus"], zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[inputs["sharding"]],
            micro_batch=inputs["micro_batch"], recompute="full" if inputs["act_ckpt"] else "none",
        )  # fmt: skip
        model = gpt(hidden, layers, heads, inputs["seq"], 50368, norm_bias=False, **dict.fromkeys(ALL_BIASES, False))
        links = cluster(device, inputs["gpus"], 25e9 if device.name.startswith("A100") else None)
        job = Job(
            model, layout, links, inputs["global_batch"], "fp8" if "fp8" in inputs["precision"] else "bf16",
            frameworks.find("fsdp"),
        )  # fmt: skip
        yield Case(
            case["case"], f"MPT {device.name}", job, job.tokens / (seen["tok_s_gpu"] * inputs["gpus"]), None, case
        )


# --- BLOOM's preparation ---------------------------------------------------------------------------------------------------


# Bytes/s that a device sends out of its node on Jean Zay, where 8 devices share 4 Omni-Path links of 100 Gb/s. BigScience
# measured an all-reduce between two nodes at 135 Gb/s (bigscience's experiments/README.md), and one of its A100 nodes, in the
# environment of the run, at 41 over one ring of two channels (experiments/bandwidth/all_reduce_bench-a100-n4.txt).
JEAN_ZAY = 135e9 / 8 / 8


def bloom(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of BLOOM's preparation. Rows without a time have None.

    64 heads where the row has none ("all NHEADS=64 (above too)"), 250,880 ids, full recompute, and ZeRO-1 unless ZS gives another
    stage.
    """
    device = devices.find("A100 SXM 80GB")
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        if not inputs.get("shape_consistent_with_size", True) or (
            "GBS" not in inputs and "GBS" not in str(inputs["context"])
        ):
            continue
        said = re.search(r"NHEADS=(\d+)", " ".join(inputs["context"]))
        heads = int(inputs["NHEADS"]) if "NHEADS" in inputs else int(said[1]) if said and inputs["line"] < 500 else 64
        batch = re.search(r"GBS=(\d+)", str(inputs["context"]))
        global_batch = int(inputs["GBS"]) if "GBS" in inputs else int(batch[1]) if batch else 2048
        model = gpt(
            inputs["hidden_parsed"], inputs["layers_parsed"], heads, inputs["seq"], padded(250680, int(inputs["TP"]))
        )
        data = inputs["gpus"] // (int(inputs["TP"]) * int(inputs["PP"]))  # the DP of one row contradicts its GPUs
        layout = Layout(
            shard=data, tensor=int(inputs["TP"]), pipeline=int(inputs["PP"]), micro_batch=int(inputs["MBS"]),
            zero=int(inputs.get("ZS", 1)), recompute="full", sequence_parallel=False,
        )  # fmt: skip
        job = Job(
            model,
            layout,
            cluster(device, layout.world, JEAN_ZAY / PHYSICS.inter),
            global_batch,
            "bf16",
            frameworks.find("megatron-deepspeed"),
        )
        memory = seen["mem_gb"] * 1e9 if seen.get("mem_gb") else None
        # Two rows of the source have their columns swapped (the reference file's note): another row has the same run correctly.
        seconds = seen.get("hw_tflops_per_gpu" if inputs["line"] in (669, 670) else "iter_time_s")
        yield Case(case["case"], "BLOOM", job, seconds, memory, case)


# --- B200, one node, Megatron-Core -----------------------------------------------------------------------------------------


def b200(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield SimuMax's dense models on a B200 node, without overlap (the repository's repro guide).

    DeepSeek's models are mixtures of experts and are left out.
    """
    device = devices.find("B200 SXM")
    for case in cases:
        inputs, seen = case["inputs"], case["observed"]
        size = re.fullmatch(r"llama3_(\d+)b", inputs["model"])
        if size is None:
            continue
        virtual = re.search(r"_v?vp(\d+)_", case["case"])
        stages = int(virtual[1]) if virtual else 1
        layout = Layout(
            shard=inputs["dp"], tensor=inputs["tp"], pipeline=inputs["pp"], context=inputs.get("cp") or 1, virtual=stages, zero=1,
            schedule="interleaved" if stages > 1 else "1f1b", micro_batch=inputs["micro_batch"],
        )  # fmt: skip
        batch = inputs["micro_batch_count"] * inputs["micro_batch"] * inputs["dp"]
        job = Job(
            llama3(size[1], inputs["seq"], inputs["layers"]), layout, cluster(device, layout.world), batch,
            inputs.get("precision", "bf16"), frameworks.find("megatron-core-sync"),
        )  # fmt: skip
        yield Case(case["case"], "B200", job, seen["iter_ms"] / 1e3, seen["alloc_gib"] * GIB, case)


# --- nanotron's sweep on H100 ----------------------------------------------------------------------------------------------


# Bytes/s that a device of the sweep's cluster sends out of its node, fitted to the rows of its 1.34B and 8.86B models and
# rounded: half of the 400 Gb/s of its data sheet. The errors of the 3.57B and 80B rows were known.
SWEEP_INTER = 25e9


def layouts_h100(rows: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield nanotron's sweep. Failed rows have no time and no memory.

    Rows whose micro-batches do not add up to the batch keep the measured values. `gathered` and `left_out` come from
    planner_sweep.py; without them the profile's value is used and no row is left out.
    """
    device = devices.find("H100 SXM")
    for row in rows:
        shape = row["arch"]
        framework = frameworks.find("nanotron")
        framework = replace(framework, gathered=row.get("gathered", framework.gathered))
        model = llama(
            shape["hidden"], shape["layers"], shape["heads"], shape["kv_heads"], shape["ffn"], 4096, 131072, shape["tied"]
        )  # fmt: skip
        layout = Layout(
            replicate=1 if row["zero"] else row["dp"], shard=row["dp"] if row["zero"] else 1, zero=row["zero"], tensor=row["tp"],
            pipeline=row["pp"], micro_batch=row["mbs"],
        )  # fmt: skip
        job = Job(model, layout, cluster(device, row["gpus"], SWEEP_INTER), row["gbs"], "bf16", framework)
        rate, memory = row["tok_s_gpu"], row["mem_gb"]
        name = f"{row['model_b']}B-{row['nodes']}n-dp{row['dp']}-tp{row['tp']}-pp{row['pp']}-mbs{row['mbs']}-zero{row['zero']}"
        seconds = job.tokens / (rate * row["gpus"]) if row["status"] == "ok" and rate else None
        taken = memory * 1e9 if memory else None
        yield Case(name, f"nanotron {row['model_b']}B", job, seconds, taken, row, row.get("left_out", ""))


# --- Llama 3 405B ----------------------------------------------------------------------------------------------------------

# Grattafiori et al. 2024, table 4: GPUs, tensor, context, pipeline, data, sequence, sequences per data rank, TFLOP/s per GPU. The
# printed 4 data ranks of the last row contradict its 16,384 GPUs and its 16M tokens: 8 agree with both.
LLAMA3_TABLE_4 = (
    (8192, 8, 1, 16, 64, 8192, 32, 430.0),
    (16384, 8, 1, 16, 128, 8192, 16, 400.0),
    (16384, 8, 16, 16, 8, 131072, 16, 380.0),
)


def llama3_405b(cases: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield table 4 of the Llama 3 paper; the file itself has only its interruptions.

    From section 3.3.2: 8 stages per device (126 blocks plus embedding and head over 16 ranks), no recompute, ZeRO-2. Assumed: a
    micro-batch of 1, and FLOPs of 6 per parameter plus attention's causal half.
    """
    del cases
    for gpus, tensor, context, pipeline, data, sequence, each, tflops in LLAMA3_TABLE_4:
        model = llama3("405", sequence)
        layout = Layout(
            shard=data, tensor=tensor, context=context, pipeline=pipeline, virtual=8, schedule="interleaved", zero=2,
        )  # fmt: skip
        job = Job(
            model,
            layout,
            cluster(devices.find("H100 SXM"), gpus),
            data * each,
            "bf16",
            frameworks.find("llama3"),
        )
        seconds = flops_per_token(model) * job.tokens / (tflops * 1e12 * gpus)
        yield Case(f"Llama3-405B-{gpus}-seq{sequence}", "Llama 3 405B", job, seconds, None, {"tflops": tflops})


READERS = {
    "step_time_a100.json": step_time_a100,
    "megatron.json": megatron,
    "papers.json": papers,
    "activation_memory.json": activation_memory,
    "torchtitan.json": torchtitan,
    "mpt.json": mpt,
    "bloom.json": bloom,
    "b200.json": b200,
    "layouts_h100.json": layouts_h100,
    "llama3.json": llama3_405b,
}
