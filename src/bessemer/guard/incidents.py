"""The record of incidents, with advice for each kind of alarm."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.logfile import LogFile, end_torn_line, json_line

# What practitioners did, with the source.
ADVICE = {
    "nonfinite": "A single one is skipped and harmless. Several in a row: lower train.optimizer.learning_rate or train in bf16 "
    "instead of fp16, whose range ends at 65,504 (Micikevicius et al. 2018); look at the documents.",
    "spike": "One bad batch; its update is skipped, as OLMo-core's SkipStepOptimizer does. If it recurs, look at the documents "
    "for repeated strings, which OLMo 2 filters out (OLMo et al. 2024), or lower train.optimizer.learning_rate.",
    "shift": "PaLM went back about 100 steps and skipped 200 to 500 batches (Chowdhery et al. 2022, section 5.1). Go on from the "
    "last checkpoint before it; if it recurs over other data, the learning rate is too high.",
    "drift": "The loss rises slowly: the learning rate is too high for this stage, or the mixture of sources has changed. OPT "
    "lowered the learning rate and went on from an earlier checkpoint (Zhang et al. 2022, section 2.5).",
    "diverged": "The learning rate is too high or the warm-up too short: try a third of train.optimizer.learning_rate, or twice "
    "train.schedule.warmup_steps (Wortsman et al. 2023).",
    "dead": "No gradient reaches the weights: a learning rate that was too high has saturated the model, or the starting weights "
    "are degenerate. Start again with a tenth of train.optimizer.learning_rate.",
    "corruption": "A bit of memory or a result was wrong without an error. If the same rank is named again, take its device out: "
    "six of Llama 3's interruptions in 54 days were silent corruption (Dubey et al. 2024, section 3.3.4), and vendors' "
    "diagnostics find about 70% of such devices (ByteRobust 2025, section 9).",
    "straggler": "All processes wait for it in every step. Look at its node: other work there, a lowered clock, a slow "
    "disk; run `bessemer check` there, and leave it out if it stays slow, as MegaScale does (Jiang et al. 2024).",
    "hang": "The stacks say where each process waits. One that was stopped or blocked in the system: look at its node (disk, "
    "network file system, device). One that computes: look for a step that is far longer than the others.",
    "lost": "SIGKILL is mostly the kernel's for lack of memory (`dmesg` on that node says so) or the scheduler's; SIGSEGV and "
    "SIGBUS are a library's or a device's. If the same node is named again, leave it out: 78% of Llama 3's unexpected "
    "interruptions came from hardware (Dubey et al. 2024, section 3.3.4).",
    "plateau": "The model has learned little more than how often each token occurs. `bessemer check RECIPE` sees whether it can "
    "learn a batch by heart, and whether the targets fit the inputs; a learning rate far too high or too low looks the same.",
    "attention": "Logits that grow without bound end in a divergence. Normalising queries and keys (model.qk_norm) or a smaller "
    "learning rate stops it (Wortsman et al. 2023, section 3.1).",
    "activation": "Activations that grow leave the range in which bf16 is fine enough: more weight decay, or a smaller "
    "learning rate.",
    "slow": "Something else runs on this machine, a device is throttled, or a link is worse than it was: `bessemer check RECIPE` "
    "measures each.",
    "data_wait": "The loader does not keep up: a slow file system under tokens/, or cores that others use.",
    "explosion": "Clipping keeps the update small. If it recurs, lower train.optimizer.learning_rate or lengthen the warm-up.",
}


def record(path: Path, *, step: int, what: str, cause: str, action: str, rank: int = 0, **more: Any) -> None:
    """Append an incident to incidents.jsonl. what: its kind, as nonfinite_step; cause, action: for a person.

    One that cannot be written (a full disk) is written with the next one of this process.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    row = {"time": now, "step": step, "rank": rank, "what": what, "cause": cause, "action": action, **more}
    _log(path).append(json_line(row))


@cache
def _log(path: Path) -> LogFile:
    end_torn_line(path)
    return LogFile(path)
