"""Earlier results of a run folder: set aside in previous-N/ before a training takes their place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bessemer.checkpoint.protocol import drop_newer
from bessemer.errors import BessemerError
from bessemer.run import LATEST, RunFolder, checkpoint_name, link, staging

# What follows from the last step of a training and is made again when it goes on.
RESULTS = (
    "mixture.json", "evaluation.json", "export", "report.html", "profile", "planned_against_measured.json",
)  # fmt: skip
# What a training that goes on keeps writing to.
TRAINED = (
    "recipe.toml", "given.json", "derived.json", "plan.json", "*.jsonl", "tensorboard", "environment.json", *RESULTS,
)  # fmt: skip


def set_aside(run: RunFolder) -> Path | None:
    """Move what training made into previous-N/, so that the run starts over and nothing is lost. What was derived of the text
    stays with the corpus and the tokens that were made by it, and is copied."""
    there = [path for name in (*TRAINED, "checkpoints") for path in run.path.glob(name)]
    if not there or there == [run.derived]:
        return None
    place = _place(run)
    place.mkdir()
    for path in there:
        if path == run.derived:
            shutil.copy2(path, place)
        else:
            os.rename(path, place / path.name)
    return place


def copy_aside(run: RunFolder, newest: int) -> Path:
    """Copy the result of a training that will go on, with its checkpoint of step `newest`, into previous-N/.

    The copy appears as a whole or not at all. Files are hard links, but for logs, which are written to in place. Raises
    BessemerError where it cannot be written; nothing has changed then.
    """
    place = _place(run)
    try:
        with staging(place) as staged:
            for name in (*TRAINED, f"checkpoints/{checkpoint_name(newest)}"):
                for source in run.path.glob(name):
                    link(source, staged / source.relative_to(run.path))
            (staged / "checkpoints" / LATEST).write_text(checkpoint_name(newest))
    except OSError as error:
        raise BessemerError(
            f"{place}: setting the earlier result aside failed ({error.strerror or error}); the run is as it was. Free some "
            "space, or lift the limit on it, and give the command again"
        ) from None
    return place


def drop_results(run: RunFolder, step: int) -> None:
    """Remove the checkpoints after `step` and what was made from the last one; `copy_aside` has kept it."""
    drop_newer(run.checkpoints, step)
    for name in RESULTS:
        path = run.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _place(run: RunFolder) -> Path:
    """The next previous-N."""
    numbers = [path.name.removeprefix("previous-") for path in run.path.glob("previous-*")]
    return run.path / f"previous-{max((int(number) for number in numbers if number.isdigit()), default=0) + 1}"
