"""Corpus and tokens of the same inputs are built once and shared; nothing half-built, nothing that another run can harm."""

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.run.stage import mark_stage, stage_is_current, staging
from bessemer.workflow import reuse


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_run_on_the_same_sources_shares_them(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runs / "small", runs / "second"
    sets = ("--set", f"run.dir={runs}", "--set", "run.name=second")
    for stage in ("corpus", "tokens"):
        with monkeypatch.context() as patched:
            for module in ("corpus.pipeline", "tokens.build"):
                patched.setattr(f"bessemer.{module}.build", lambda *given: pytest.fail("built once more"))
            # Neither the seed of the run nor how sources are mixed says which tokens there are.
            changes = ("--set", "corpus.sources.code.weight=2.0", "--set", "corpus.sources.prose.weight=1.0")
            assert run_command([stage, str(recipe_file), *sets, *changes, "--set", "run.seed=8"]) == 0
        assert f"shared with {first}" in capsys.readouterr().err
        assert files(second / stage) == files(first / stage)
    shard = next((second / "tokens").glob("*.bin"))
    assert os.stat(shard).st_nlink >= 2, "linked, not copied"
    assert not list(runs.glob(".building-*"))
    before = files(second / "tokens"), files(second / "corpus")
    shutil.rmtree(first)
    assert (files(second / "tokens"), files(second / "corpus")) == before
    document = _identity(second)
    assert run_command(["trace", str(second), "--document", document, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"]
    # Other inputs are built.
    assert (
        run_command(["tokens", str(recipe_file), *sets[:2], "--set", "run.name=third", "--set", "tokens.held_out=0.3"])
        == 2
    )
    assert "no documents here" in capsys.readouterr().err


def test_damaged_tokens_of_another_run_are_not_taken_over(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = runs / "small"
    shard = next((first / "tokens").glob("*train*.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.unlink()  # the fixture's file has other names
    shard.write_bytes(content)
    sets = ("--set", f"run.dir={runs}", "--set", "run.name=second")
    for stage in ("corpus", "tokens"):
        assert run_command([stage, str(recipe_file), *sets]) == 0
    said = capsys.readouterr().err
    assert f"corpus shared with {first}" in " ".join(said.split()), said
    assert "damaged, so it is not taken over" in said
    assert (runs / "second" / "tokens" / shard.name).read_bytes() != bytes(content)


def _identity(run: Path) -> str:
    import pyarrow.parquet as parquet

    part = next((run / "corpus" / "documents").glob("*.parquet"))
    return str(parquet.read_table(part)["identity"].to_pylist()[0])


def make(folder: Path, inputs: str, text: str = "x") -> None:
    with staging(folder) as staged:
        (staged / "part").write_text(text)
        mark_stage(staged, inputs)


def test_only_whole_stages_of_the_same_inputs_are_taken(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "mine"):
        (tmp_path / name).mkdir()
    make(tmp_path / "a" / "tokens", "other")
    make(tmp_path / "b" / "tokens", "same")
    (tmp_path / "b" / "tokens" / "part").write_text("")
    with reuse.built_once(tmp_path / "mine" / "tokens", "same") as taken:
        assert taken is None, "b's file is cut short"
    make(tmp_path / "c" / "tokens", "same")
    with reuse.built_once(tmp_path / "mine" / "tokens", "same") as taken:
        assert taken == tmp_path / "c"
    assert stage_is_current(tmp_path / "mine" / "tokens", "same")


def test_where_links_are_impossible_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a" / "tokens", "same")
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "link", lambda *given, **named: (_ for _ in ()).throw(OSError(18, "another file system")))
    with reuse.built_once(tmp_path / "mine" / "tokens", "same") as taken:
        assert taken == tmp_path / "a"
    assert files(tmp_path / "mine" / "tokens") == files(tmp_path / "a" / "tokens")
    assert os.stat(tmp_path / "mine" / "tokens" / "part").st_nlink == 1


def test_a_run_that_vanishes_while_it_is_linked_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a" / "tokens", "same")
    (tmp_path / "mine").mkdir()

    def vanished(*given: object, **named: object) -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(os, "link", vanished)
    with reuse.built_once(tmp_path / "mine" / "tokens", "same") as taken:
        assert taken is None
    assert not (tmp_path / "mine" / "tokens").exists()
    assert not list((tmp_path / "mine").iterdir())


def _build(folder: Path, log: Path) -> None:
    with reuse.built_once(folder, "same") as taken:
        if taken is None:
            time.sleep(0.2)
            make(folder, "same", folder.parent.name)
    with open(log, "a") as file:
        file.write(f"{folder.parent.name} {taken and taken.name}\n")


def test_runs_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    names = ("a", "b", "c", "d")
    for name in names:
        (tmp_path / name).mkdir()
    processes = [context.Process(target=_build, args=(tmp_path / name / "tokens", tmp_path / "log")) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = dict(line.split() for line in (tmp_path / "log").read_text().splitlines())
    assert list(found.values()).count("None") == 1
    assert len({(tmp_path / name / "tokens" / "part").read_text() for name in names}) == 1
    assert not list(tmp_path.glob(".building-*"))
