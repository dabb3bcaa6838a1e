"""Tasks as JSON, invalid tasks, and failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_tasks import square

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus.dedup.lines import LineKeys
from bessemer.corpus.dedup.task import DedupPlan
from bessemer.corpus.global_steps import BucketPart
from bessemer.corpus.partition import Bucket
from bessemer.recipe import Dedup, Work
from bessemer.run_tasks import slurm
from bessemer.run_tasks.local import run_in_thread
from bessemer.run_tasks.run import require_engine
from bessemer.run_tasks.task import Task, answer, raise_error
from bessemer.storage.filesystem import AnyPath, StorePath


def test_failures_of_the_engine_give_a_one_line_error() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    with pytest.raises(BessemerError, match=r"^corpus: .*ValueError: first$"):
        run_in_thread(fail)


def test_settings_of_another_engine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_engine(Work.model_validate({"address": "auto", "slurm": {"sbatch": ("--partition=a",)}}))
    said = capsys.readouterr().err
    assert "corpus.address" in said and "corpus.slurm" in said


@pytest.mark.parametrize("work", [Path("/not UTF-8 \udcff\n"), StorePath("s3://bucket/a")])
def test_a_task_survives_a_round_trip_through_json(work: AnyPath) -> None:
    plan = DedupPlan(Dedup(against=("/a",), min_jaccard=0.1), ("a",), 2, 3)
    task = LineKeys(work, "digest", 4, 5, plan, BucketPart((Bucket(work, "a", 1, 2, (3, 5)),)))
    line = task.to_json()
    assert "\n" not in line
    assert Task.from_json(line) == task


def test_failures_of_tasks_are_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    raise_error(answer(square(tmp_path, 1).to_json()))
    with pytest.raises(InputError, match="^square 2: what, where$"):
        raise_error(answer(square(tmp_path, 2, "fails").to_json()))
    (tmp_path / "a" / "made").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as of_system:
        raise_error(answer(square(tmp_path / "a", 3).to_json()))
    assert of_system.value.filename == str(tmp_path / "a" / "made")


@pytest.mark.parametrize(
    "kind", ["cut off", "pickle", "foreign class", "untrusted file", "program", "no task", "unknown field"]
)
def test_an_invalid_task_in_a_queue_is_one_error_and_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    task, queue = square(tmp_path, 1), tmp_path / "queue"
    fields = json.loads(task.to_json())
    monkeypatch.setenv(extensions.TRUSTED, "{}")  # `to_json` accepts a class of any file
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass")
    content = {
        "cut off": task.to_json()[:-9],
        "pickle": f"cbuiltins\nexec\n(Vopen({str(tmp_path / 'ran')!r}, 'w')\ntR.",
        "foreign class": json.dumps({**fields, "class": "subprocess:Popen", "args": ["touch", str(tmp_path / "ran")]}),
        "untrusted file": json.dumps({**fields, "class": f"{tmp_path / 'evil.py'}:Evil"}),
        "program": json.dumps({**fields, "class": "bessemer.__main__:main"}),
        "no task": json.dumps({"class": "bessemer.recipe.corpus:Dedup"}),
        "unknown field": json.dumps({"class": "bessemer.tokens.tasks:EncodeRowGroups", "work": "/", "command": "x"}),
    }[kind]
    for folder in ("tasks", "begun", "ended"):
        (queue / folder).mkdir(parents=True)
    (queue / "tasks" / "0").write_text(content)
    slurm.main(queue, "0")
    with pytest.raises(BessemerError) as failure:
        raise_error((queue / "ended" / "0").read_bytes())
    assert str(queue / "tasks" / "0") in str(failure.value) and "\n" not in str(failure.value)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "made").exists()
