"""The kinds of incident, each with all that the program knows of it, and the record of incidents in incidents.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bessemer.logfile import LogFile, end_torn_line, json_line

RECORDED = "recorded"  # the action of an incident to which there is no response
KINDS: dict[str, IncidentKind] = {}
"""By name."""


@dataclass(frozen=True)
class IncidentKind:
    """A kind of incident.

    name: as in incidents.jsonl; response: of the guard, or of the launcher (restart); advice: what practitioners did, with
    the source; is_fatal: the run stops where it cannot roll back, otherwise that is only recorded; has_bad_step: `bessemer
    diagnose` can find what was wrong with a step; has_sharp_onset: the first bad step is known; is_hardware_fault: the state
    was wrong, not the training, so a rollback repeats the same steps with the same batches and learning rates; is_minor: the
    report's story leaves it out where it was only recorded; quiet_steps: at least so many steps are between two records.
    """

    name: str
    response: Literal["record", "skip", "roll back", "restart"]
    advice: str = ""
    is_fatal: bool = False
    has_bad_step: bool = False
    has_sharp_onset: bool = True
    is_hardware_fault: bool = False
    is_minor: bool = False
    quiet_steps: int = 100

    def __post_init__(self) -> None:
        KINDS[self.name] = self


NONFINITE = IncidentKind(
    "nonfinite", "skip",
    "A single one is skipped and harmless. Several in a row: lower train.optimizer.learning_rate or train in bf16 "
    "instead of fp16, whose range ends at 65,504 (Micikevicius et al. 2018); look at the documents.",
    is_fatal=True, has_bad_step=True,
)  # fmt: skip
SPIKE = IncidentKind(
    "spike", "skip",
    "One bad batch; its update is skipped, as OLMo-core's SkipStepOptimizer does. If it recurs, look at the "
    "documents for repeated strings, which OLMo 2 filters out (OLMo et al. 2024), or lower "
    "train.optimizer.learning_rate.",
    has_bad_step=True, is_minor=True,
)  # fmt: skip
SHIFT = IncidentKind(
    "shift", "roll back",
    "PaLM went back about 100 steps and skipped 200 to 500 batches (Chowdhery et al. 2022, section 5.1). Go on from "
    "the last checkpoint before it; if it recurs over other data, the learning rate is too high.",
    has_bad_step=True,
)  # fmt: skip
DRIFT = IncidentKind(
    "drift", "roll back",
    "The loss rises slowly: the learning rate is too high for this stage, or the mixture of sources has changed. OPT "
    "lowered the learning rate and went on from an earlier checkpoint (Zhang et al. 2022, section 2.5).",
    has_bad_step=True, has_sharp_onset=False,
)  # fmt: skip
DIVERGED = IncidentKind(
    "diverged", "roll back",
    "The learning rate is too high or the warm-up too short: try a third of train.optimizer.learning_rate, or twice "
    "train.schedule.warmup_steps (Wortsman et al. 2023).",
    is_fatal=True, has_bad_step=True,
)  # fmt: skip
DEAD = IncidentKind(
    "dead", "roll back",
    "No gradient reaches the weights: a learning rate that was too high has saturated the model, or the starting "
    "weights are degenerate. Start again with a tenth of train.optimizer.learning_rate.",
    is_fatal=True, has_bad_step=True,
)  # fmt: skip
CORRUPTION = IncidentKind(
    "corruption", "roll back",
    "A bit of memory or a result was wrong without an error. If the same rank is named again, take its device out: "
    "six of Llama 3's interruptions in 54 days were silent corruption (Dubey et al. 2024, section 3.3.4), and "
    "vendors' diagnostics find about 70% of such devices (ByteRobust 2025, section 9).",
    is_fatal=True, is_hardware_fault=True,
)  # fmt: skip
EXPLOSION = IncidentKind(
    "explosion", "record",
    "Clipping keeps the update small. If it recurs, lower train.optimizer.learning_rate or lengthen the warm-up.",
    has_bad_step=True, is_minor=True,
)  # fmt: skip
PLATEAU = IncidentKind(
    "plateau", "record",
    "The model has learned little more than how often each token occurs. `bessemer check RECIPE` sees whether it can "
    "learn a batch by heart, and whether the targets fit the inputs; a learning rate far too high or too low looks "
    "the same.",
    quiet_steps=1000,
)  # fmt: skip
ATTENTION = IncidentKind(
    "attention", "record",
    "Logits that grow without bound end in a divergence. Normalising queries and keys (model.qk_norm) or a smaller "
    "learning rate stops it (Wortsman et al. 2023, section 3.1).",
    quiet_steps=1000,
)  # fmt: skip
ACTIVATION = IncidentKind(
    "activation", "record",
    "Activations that grow leave the range in which bf16 is fine enough: more weight decay, or a smaller learning "
    "rate.",
    quiet_steps=1000,
)  # fmt: skip
SLOW = IncidentKind(
    "slow", "record",
    "Something else runs on this machine, a device is throttled, or a link is worse than it was: `bessemer check "
    "RECIPE` measures each.",
    quiet_steps=1000, is_minor=True,
)  # fmt: skip
DATA_WAIT = IncidentKind(
    "data_wait", "record",
    "The loader does not keep up: a slow file system under tokens/, or cores that others use.",
    quiet_steps=1000, is_minor=True,
)  # fmt: skip
STRAGGLER = IncidentKind(
    "straggler", "record",
    "All processes wait for it in every step. Look at its node: other work there, a lowered clock, a slow disk; run "
    "`bessemer check` there, and leave it out if it stays slow, as MegaScale does (Jiang et al. 2024).",
)  # fmt: skip
HANG = IncidentKind(
    "hang", "restart",
    "The stacks say where each process waits. One that was stopped or blocked in the system: look at its node (disk, "
    "network file system, device). One that computes: look for a step that is far longer than the others.",
)  # fmt: skip
LOST = IncidentKind(
    "lost", "restart",
    "SIGKILL is mostly the kernel's for lack of memory (`dmesg` on that node says so) or the scheduler's; SIGSEGV "
    "and SIGBUS are a library's or a device's. If the same node is named again, leave it out: 78% of Llama 3's "
    "unexpected interruptions came from hardware (Dubey et al. 2024, section 3.3.4).",
)  # fmt: skip
CHECKPOINT_FAILED = IncidentKind("checkpoint_failed", "record")
CHECKPOINT_DAMAGED = IncidentKind("checkpoint_damaged", "record")
MIRROR_FAILED = IncidentKind("mirror_failed", "record")
RECIPE_CHANGED = IncidentKind("recipe_changed", "record")
FEWER_PROCESSES = IncidentKind("fewer_processes", "record")


def record(
    path: Path, kind: IncidentKind, *, step: int, cause: str, action: str = RECORDED, rank: int = 0, **more: Any
) -> None:
    """Append an incident, with the advice of its kind, to incidents.jsonl. cause, action: sentences for a person.

    One that cannot be written (a full disk) is written with the next one of this process.
    """
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "rank": rank, "what": kind.name,
        "cause": cause, "action": action, **({"advice": kind.advice} if kind.advice else {}), **more,
    }  # fmt: skip
    _log(path).append(json_line(row))


@cache
def _log(path: Path) -> LogFile:
    end_torn_line(path)
    return LogFile(path)
