"""A trained and exported run whose weights do not change, so that its losses can be computed again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

RATE = 1e-12  # small enough that 24 steps change no loss


@pytest.fixture(scope="session")
def still_run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that is trained, evaluated and exported. Read only."""
    from bessemer.cli import run_command

    folder = tmp_path_factory.mktemp("still")
    shutil.copytree(prepared / "runs", folder / "runs")
    sets = (f'run.dir="{folder / "runs"}"', f"train.optimizer.learning_rate={RATE}", 'train.precision="fp32"')
    changes = [part for one in sets for part in ("--set", one)]
    assert run_command(["run", str(prepared / "small.toml"), *changes]) == 0
    return folder / "runs" / "small"
