"""A run goes on when the files of its text were copied, moved, touched or taken away, and stops when they hold something else."""

import os
import shutil
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.common.hashing import SAMPLE_BYTES, sampled_sha256
from tests.conftest import recipe_text
from tests.newest import Result, training_result

STEPS = "--set", "train.steps=32"


@pytest.fixture(scope="module")
def made(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, recipe and a run of half its steps, as it is kept for the tests: `kept`, and where it was made: `project`."""
    folder = tmp_path_factory.mktemp("rebuild") / "project"
    shutil.copytree(prepared / "text", folder / "text")
    relative = recipe_text(folder).replace(str(folder) + "/text", "text")
    (folder / "small.toml").write_text(relative.replace("[train]", '[train]\nschedule = { kind = "constant" }'))
    assert run(folder) == 0
    shutil.copytree(folder, folder.with_name("kept"))
    return folder


@pytest.fixture(scope="module")
def straight(made: Path) -> Result:
    """The result of an undisturbed run of 32 steps."""
    assert run(restored(made), *STEPS, "--set", "run.name=straight") == 0
    return training_result(made / "runs" / "straight")


@pytest.fixture
def project(made: Path, straight: Result) -> Path:
    """The folder as it was made, where it was made, with the times of its files; free to be written to."""
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


def test_touched_and_moved_text_goes_on_bit_for_bit(
    project: Path, straight: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    touch(project / "text")
    capsys.readouterr()
    assert run(project) == 0, "nothing is left to do"
    assert "corpus: its files lie elsewhere or have another time, and hold the same" in capsys.readouterr().err
    moved = project.rename(project.with_name("elsewhere"))
    assert run(moved, *STEPS, "--set", f"run.dir={moved / 'runs'}") == 0
    assert training_result(moved / "runs" / "small") == straight


def test_text_that_is_gone_is_not_needed_any_more(
    project: Path, straight: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "text")
    assert run(project, *STEPS) == 0
    assert "going on with the corpus as it was built" in capsys.readouterr().err
    assert training_result(project / "runs" / "small") == straight
    assert run(project, "--set", "run.name=new") == 2, "a run that has trained nothing needs it"


def test_a_renamed_copy_goes_on_after_each_start(project: Path, straight: Result) -> None:
    """Its checkpoints carry the name that it had, its recipe the new one, from the first start on."""
    copy = project / "runs" / "copy"
    shutil.copytree(project / "runs" / "small", copy)
    for more in ((), STEPS):
        assert run_command(["train", str(copy), *more]) == 0
    assert training_result(copy) == straight


@pytest.mark.parametrize("change", ["edited", "added", "renamed"])
def test_other_text_is_refused_under_checkpoints(
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


def test_a_damaged_record_is_not_called_changed_sources(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "runs" / "small" / "corpus" / "stage.json").write_text("{")
    assert run(project, *STEPS) == 2
    assert "stage.json is missing or damaged" in capsys.readouterr().err


def test_samples_of_a_file_notice_its_ends_its_middle_and_all_of_a_short_one(tmp_path: Path) -> None:
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


def test_results_of_a_run_are_not_taken_for_text(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = project / "runs" / "small"
    for path in (made / "checkpoints", made / "report.html"):
        assert run_command(["run", str(path)]) == 2, path
        assert f"a result of the run {made}" in capsys.readouterr().err
    assert run_command(["check", str(made / "export")]) == 2
    assert "a model, and no text" in capsys.readouterr().err


def test_a_damaged_corpus_is_not_made_again_from_fewer_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = project / "runs" / "small" / "corpus"
    (corpus / "statistics.json").unlink()
    (project / "text" / "prose" / "000.txt").unlink()
    before = sorted(corpus.rglob("*"))
    assert run(project, *STEPS) == 2
    assert "(1 file missing (prose/000.txt))" in capsys.readouterr().err
    assert sorted(corpus.rglob("*")) == before
