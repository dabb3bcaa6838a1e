"""The choice of the checkpoint that a command or a new run uses: by its step, or by its held-out loss."""

from __future__ import annotations

from bessemer.common.errors import InputError
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_steps


def best_validation(run: RunDirectory) -> tuple[float, int] | None:
    """Return the lowest held-out loss of a published checkpoint and its step; None if none was validated."""
    steps = set(checkpoint_steps(run.checkpoints))
    rows = [row for row in read_steps(run.metrics) if row.get("kind") == "validation" and row["step"] in steps]
    return min(((row["loss"], row["step"]) for row in rows if row.get("loss") is not None), default=None)


def find_step(run: RunDirectory, wanted: int | str, option: str) -> int:
    """Return the step of a published checkpoint.

    Args:
        run: The run directory.
        wanted: The number of the step, or "best" for the lowest held-out loss.
        option: The command-line option or key that the error names.

    Raises:
        InputError: The run has no such checkpoint.
    """
    steps, best = checkpoint_steps(run.checkpoints), best_validation(run)
    if wanted == "best" and best is not None:
        return best[1]
    if str(wanted).isdecimal() and int(wanted) in steps:
        return int(wanted)
    what = "validated checkpoint" if wanted == "best" else "checkpoint of this step"
    raise InputError(f"{option} {wanted}: {run.path} has no {what}; it has: {', '.join(map(str, steps)) or 'none'}")
