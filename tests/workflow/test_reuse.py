"""Corpus and tokens of equal inputs are built once and shared, without incomplete stages or effects between runs."""

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from bessemer.cli import run_command
from bessemer.common.hashing import SAMPLE_BYTES, sampled_sha256
from bessemer.run.stage import mark_stage, stage_is_current, staging
from bessemer.workflow import reuse
from tests.conftest import recipe_text
from tests.newest import Result, training_result


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
            # Neither the seed of the run nor the mixture changes the tokens.
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
    document = str(parquet.read_table(second / "corpus" / "documents")["identity"].to_pylist()[0])
    assert run_command(["trace", str(second), "--document", document, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"]
    # Other inputs are built again.
    assert (
        run_command(["tokens", str(recipe_file), *sets[:2], "--set", "run.name=third", "--set", "tokens.held_out=0.3"])
        == 2
    )
    assert "bessemer corpus" in capsys.readouterr().err


def test_damaged_tokens_of_another_run_are_not_reused(
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
    assert str(first / "tokens") in said
    assert (runs / "second" / "tokens" / shard.name).read_bytes() != bytes(content)


def make(folder: Path, inputs: str, text: str = "x") -> None:
    with staging(folder) as staged:
        (staged / "part").write_text(text)
        mark_stage(staged, inputs)


def test_only_complete_stages_of_the_same_inputs_are_reused(tmp_path: Path) -> None:
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


def test_stages_are_copied_if_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a" / "tokens", "same")
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "link", lambda *given, **named: (_ for _ in ()).throw(OSError(18, "another file system")))
    with reuse.built_once(tmp_path / "mine" / "tokens", "same") as taken:
        assert taken == tmp_path / "a"
    assert files(tmp_path / "mine" / "tokens") == files(tmp_path / "a" / "tokens")
    assert os.stat(tmp_path / "mine" / "tokens" / "part").st_nlink == 1


def test_a_run_that_vanishes_during_linking_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_runs_that_start_at_the_same_time_build_once(tmp_path: Path) -> None:
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


STEPS = "--set", "train.steps=32"


@pytest.fixture(scope="module")
def made(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, recipe and a half-trained run: the copy `kept`, and `project`, where it was made."""
    folder = tmp_path_factory.mktemp("rebuild") / "project"
    shutil.copytree(prepared / "text", folder / "text")
    relative = recipe_text(folder).replace(str(folder) + "/text", "text")
    (folder / "small.toml").write_text(relative.replace("[train]", '[train]\nschedule = { kind = "constant" }'))
    assert run(folder) == 0
    shutil.copytree(folder, folder.with_name("kept"))
    return folder


@pytest.fixture(scope="module")
def straight(made: Path) -> Result:
    """The result of an uninterrupted run of 32 steps."""
    assert run(restored(made), *STEPS, "--set", "run.name=straight") == 0
    return training_result(made / "runs" / "straight")


@pytest.fixture
def project(made: Path, straight: Result) -> Path:
    """A writable copy of the folder at its original path, with original file times."""
    return restored(made)


def restored(made: Path) -> Path:
    for path in made.parent.iterdir():
        if path.name != "kept":
            shutil.rmtree(path)
    shutil.copytree(made.with_name("kept"), made)
    return made


def run(folder: Path, *flags: str) -> int:
    return run_command(["run", str(folder / "small.toml"), *flags])


def touch(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_run_on_touched_or_moved_text_resumes_bit_for_bit(
    project: Path, straight: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    touch(project / "text")
    capsys.readouterr()
    assert run(project) == 0, "nothing is left to do"
    assert "  corpus: " in capsys.readouterr().err
    moved = project.rename(project.with_name("elsewhere"))
    assert run(moved, *STEPS, "--set", f"run.dir={moved / 'runs'}") == 0
    assert training_result(moved / "runs" / "small") == straight


def test_deleted_text_is_not_needed_after_the_tokens_stage(
    project: Path, straight: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "text")
    assert run(project, *STEPS) == 0
    assert "as it was built" in capsys.readouterr().err
    assert training_result(project / "runs" / "small") == straight
    assert run(project, "--set", "run.name=new") == 2, "a run that has trained nothing needs it"


def test_a_renamed_copy_resumes_after_each_start(project: Path, straight: Result) -> None:
    """Its checkpoints have the old name and its recipe the new one, from the first start on."""
    copy = project / "runs" / "copy"
    shutil.copytree(project / "runs" / "small", copy)
    for more in ((), STEPS):
        assert run_command(["train", str(copy), *more]) == 0
    assert training_result(copy) == straight


@pytest.mark.parametrize("change", ["edited", "added", "renamed"])
def test_other_text_is_an_error_once_there_are_checkpoints(
    project: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = project / "text" / "prose" / "000.txt"
    if change == "edited":
        one.write_text(one.read_text().swapcase())
    elif change == "added":
        (one.parent / "more.txt").write_text(one.read_text() + "More.")
    else:
        one.rename(one.with_name("zzz.txt"))
    before = training_result(project / "runs" / "small")
    name = {"edited": "changed (prose/000.txt)", "added": "added (prose/more.txt)", "renamed": "added (prose/zzz.txt)"}
    for command in (["run", str(project / "small.toml"), *STEPS], ["check", str(project / "runs" / "small")]):
        assert run_command(command) == 2
        assert f"1 file {name[change]}" in capsys.readouterr().err, command
    assert training_result(project / "runs" / "small") == before


def test_samples_of_a_file_cover_its_ends_its_middle_and_all_of_a_short_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 10, 3 * SAMPLE_BYTES - 1, 5 * SAMPLE_BYTES):
        data = bytearray(os.urandom(size))
        path.write_bytes(data)
        before = sampled_sha256(path)
        for place in {0, size // 2, size - 1} & set(range(size)):
            data[place] ^= 1
            path.write_bytes(data)
            assert sampled_sha256(path) != before, (size, place)
            data[place] ^= 1
        path.write_bytes(data)
        assert sampled_sha256(path) == before


def test_results_of_a_run_are_not_read_as_text(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = project / "runs" / "small"
    for path in (made / "checkpoints", made / "report.html"):
        assert run_command(["run", str(path)]) == 2, path
        assert f"a result of the run {made}" in capsys.readouterr().err
    assert run_command(["check", str(made / "export")]) == 2
    assert "a model, not text" in capsys.readouterr().err


def test_a_damaged_corpus_is_not_rebuilt_from_fewer_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = project / "runs" / "small" / "corpus"
    (corpus / "statistics.json").unlink()
    (project / "text" / "prose" / "000.txt").unlink()
    before = sorted(corpus.rglob("*"))
    assert run(project, *STEPS) == 2
    assert "(1 file missing (prose/000.txt))" in capsys.readouterr().err
    assert sorted(corpus.rglob("*")) == before
    (corpus / "stage.json").write_text("{")
    assert run(project, *STEPS) == 2
    assert "stage.json is missing or damaged" in capsys.readouterr().err, "not that its sources have changed"
