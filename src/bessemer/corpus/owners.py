"""Whose the folders are to which runs publish corpora and tokens in stores.

Their names end with an id of the run folder that wrote them, so that runs of one name and one URL never meet, and a run removes
its own alone. Runs under one `run.dir` that share a stage name its folder in their receipts.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from bessemer.run import read_json_again, stage_facts, write_json
from bessemer.store_path import STORED_AT, StorePath

RUN_ID = "run-id.json"  # in a run folder that publishes to a store


def published_place(stage: Path, inputs: str, url: str) -> StorePath:
    """The folder in a store for the large files of a stage. stage: its folder in the run; url: `corpus.publish` or
    `tokens.publish`."""
    run = stage.parent.absolute()
    if (identity := _run_id(run)) is None:
        run.mkdir(parents=True, exist_ok=True)
        identity = secrets.token_hex(4)
        write_json(run / RUN_ID, {"id": identity, "path": str(run.resolve())})
    return StorePath(f"{url.rstrip('/')}/{run.name}") / f"{stage.name}-{inputs[:16]}-{identity}"


def is_own(stage: Path, place: Path) -> bool:
    """Whether the run folder of a stage wrote a folder to which such stages are published."""
    identity = _run_id(stage.parent.absolute())
    return identity is not None and place.name.startswith(f"{stage.name}-") and place.name.endswith(f"-{identity}")


def is_publication(place: str) -> bool:
    """Whether a folder in a store is one to which a stage is published, and not one of work (DIGEST alone)."""
    return "-" in place.rpartition("/")[2]


def _run_id(run: Path) -> str | None:
    """The id of a run folder; None where it has none, or one that came with a copy or a move: another folder may have it too."""
    known = read_json_again(run / RUN_ID) or {}
    identity = known.get("id")
    return identity if isinstance(identity, str) and identity and known.get("path") == str(run.resolve()) else None


def other_runs(stage: Path, key: str, value: object) -> list[str]:
    """The names of other runs under the same `run.dir` whose receipt of this stage has a value under a key."""
    run = stage.parent.absolute()
    stages = (folder for name in (stage.name, f".{stage.name}.tmp") for folder in run.parent.glob(f"*/{name}"))
    found = {folder.parent.name for folder in stages if value is not None and stage_facts(folder).get(key) == value}
    return sorted(found - {run.name})


def other_users(stage: Path, place: str) -> list[str]:
    """The names of other runs under the same `run.dir` that have this stage in a folder of a store."""
    return other_runs(stage, STORED_AT, place)
