import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.common import log_file
from bessemer.common.errors import InputError
from bessemer.common.log_file import append_entry, close_logs, json_line
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, write_atomic  # fmt: skip
from bessemer.run.stage import mark_stage, stage_is_current, staging


@pytest.mark.fault(31)
def test_a_second_writer_is_an_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = RunDirectory(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from bessemer.run.directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).lock(): print('in', flush=True)"
    )
    with run.lock():
        done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert f"another process (pid {os.getpid()} of {socket.gethostname()}, Slurm job 7)" in done.stderr
    assert subprocess.run([sys.executable, "-c", code, str(run.path)], check=False).returncode == 0


def test_a_folder_without_write_access_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="run.dir"), RunDirectory(tmp_path / "file" / "run").lock():
        pass


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_staging_publishes_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "stage"
    with staging(target) as folder:
        (folder / "a").write_text("1")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), staging(target) as folder:  # noqa: PT012 (the block is what is tested)
            (folder / "b").write_text("2")
            raise error
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    with staging(target) as folder:
        (folder / "c").write_text("3")
    assert [path.name for path in target.iterdir()] == ["c"]


def test_a_stage_is_current_while_its_inputs_and_files_are_the_same(tmp_path: Path) -> None:
    with staging(tmp_path / "stage") as folder:
        (folder / "a").write_text("1234")
        mark_stage(folder, "inputs")
    assert stage_is_current(tmp_path / "stage", "inputs")
    assert not stage_is_current(tmp_path / "stage", "others")
    assert not stage_is_current(tmp_path / "none", "inputs")
    (tmp_path / "stage" / "a").write_text("12")
    assert not stage_is_current(tmp_path / "stage", "inputs")
    (tmp_path / "stage" / "a").unlink()
    assert not stage_is_current(tmp_path / "stage", "inputs")


def test_a_log_on_a_full_disk_is_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room, write = [10], os.write

    def scarce(file: int, data: memoryview) -> int:
        taken = min(len(data), room[0])
        room[0] -= taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:taken])

    monkeypatch.setattr(os, "write", scarce)
    path = tmp_path / "new" / "log.jsonl"
    for number in range(4):  # 9 bytes each: the second does not fit, and the file keeps only whole entries
        append_entry(path, json_line({"n": number}))
    assert read_json_lines(path) == [{"n": 0}]
    assert path.stat().st_size == 9
    room[0] = 1000
    append_entry(path, json_line({"n": 4}))
    assert read_json_lines(path) == [{"n": number} for number in range(5)]
    room[0] = 0
    append_entry(path, json_line({"n": 5}))
    append_entry(path / "beneath", b"a file is in the place of the folder")
    close_logs()
    stderr = capsys.readouterr().err
    assert stderr.count("No space left on device") == 2
    assert "log.jsonl: its last 1 entries" in stderr and "beneath: its last 1 entries" in stderr


def test_entries_delayed_by_a_full_disk_are_written_with_other_logs_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that records no further incident must not lose the one about the full disk."""
    append, full = log_file._append_whole, {"rare.jsonl", "lost.jsonl"}

    def scarce(path: Path, data: bytes) -> None:
        if path.name in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, data)

    monkeypatch.setattr(log_file, "_append_whole", scarce)
    rare = tmp_path / "rare.jsonl"
    append_entry(rare, b"1\n")
    append_entry(tmp_path / "lost.jsonl", b"2\n")
    full.remove("rare.jsonl")
    append_entry(tmp_path / "often.jsonl", b"3\n")
    assert rare.read_bytes() == b"1\n"
    full.add("rare.jsonl")
    append_entry(rare, b"4\n")
    full.remove("rare.jsonl")
    close_logs()
    assert rare.read_bytes() == b"1\n4\n" and not (tmp_path / "lost.jsonl").exists()
    assert "lost.jsonl: its last 1 entries" in capsys.readouterr().err


def test_an_incomplete_last_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n"')
    append_entry(path, json_line({"n": 1}))
    assert read_json_lines(path) == [{"n": 0}, {"n": 1}]


def test_a_rejected_run_leaves_no_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(InputError), run.lock():
        raise InputError("no text")
    assert not run.path.exists()
    with pytest.raises(InputError), run.lock():  # noqa: PT012 (the block is what is tested)
        (run.path / "stages.json").write_text("{}")
        raise InputError("later")
    assert run.path.exists()
    with pytest.raises(InputError), run.lock():
        raise InputError("again")
    assert (run.path / "stages.json").exists()
