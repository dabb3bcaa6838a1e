"""Several processes that do not fit together: one clear error from one of them, all leave soon, and no exit code is 0.

Processes are started here as a plain launcher would, with the environment of torchrun and nothing that watches over them.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from trainings import another, command, errors, lives, pid_of_rank, together, tree, wait_for_step

from bessemer.run.files import read_json_lines
from tests.ports import free_port

pytestmark = pytest.mark.long

SECONDS = 10.0
Found = list[tuple[int, str, float]]


def ranks(commands: list[list[str]], port: int, more: list[dict[str, str]] | None = None) -> Found:
    """Run each command as a rank of one group."""
    world = len(commands)
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **(more[rank] if more else {})}
        for rank in range(world)
    ]  # fmt: skip
    return together(commands, environments)


def one_error(found: Found, code: int) -> str:
    """What the one process that speaks says; all leave together with the code."""
    told = [line for _, said, _ in found for line in errors(said)]
    assert len(told) == 1, found
    assert all("Traceback" not in said for _, said, _ in found), "\n".join(said for _, said, _ in found)
    assert [ended for ended, _, _ in found] == [code] * len(found), found
    ends = [when for _, _, when in found]
    assert max(ends) - min(ends) < SECONDS
    return told[0]


def test_ranks_that_do_not_fit_together(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    # Another number of processes than the layout needs: what would fit.
    given = another(made, "number")
    told = one_error(ranks([command("train", *given, "--set", "parallel.tensor=3")] * 2, free_port()), 2)
    assert "tensor x pipeline x context = 3 does not divide 2; possible: [1, 2]" in told
    # Other values of a key.
    given = another(made, "recipes")
    one = command("train", *given, *layout)
    told = one_error(ranks([one, [*one, "--set", "train.steps=9"]], free_port()), 2)
    assert "rank 1 differs from rank 0" in told
    # A recipe that only one of them cannot read.
    told = one_error(ranks([one, [*one, "--set", "train.stepz=9"]], free_port()), 2)
    assert "unknown key; did you mean train.steps?" in told


def test_ranks_with_other_data_or_another_folder(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    runs = made.parent / "runs"
    # The tokens lie on each node's own disk (here: in its working directory), and one of them has others.
    given = another(made, "data")
    (runs / "data" / "tokens").unlink()
    os.symlink("/proc/self/cwd/tokens", runs / "data" / "tokens")
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        shutil.copytree(runs / "t" / "tokens", place / "tokens")
    manifest = places[1] / "tokens" / "manifest.json"
    text = manifest.read_text()
    at = text.index('"sha256": "', text.index('"files"')) + len('"sha256": "')
    manifest.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    one = command("train", *given, *layout)
    shells = [["bash", "-c", 'cd "$0" && exec "$@"', str(place), *one] for place in places]
    told = one_error(ranks(shells, free_port()), 2)
    assert "different recipes, tokens or versions" in told and "rank 1 differs from rank 0" in told
    # Each node has a run directory of its own under the same name.
    for place in places:
        (place / "runs" / "apart").mkdir(parents=True)
        os.symlink(runs / "t" / "tokens", place / "runs" / "apart" / "tokens")
    apart = command("train", str(made), *layout, "--set", "run.name=apart", "--set", "run.dir=runs")
    shells = [["bash", "-c", 'cd "$0" && exec "$@"', str(place), *apart] for place in places]
    told = one_error(ranks(shells, free_port()), 2)
    assert "rank 1 does not see what rank 0 writes there" in told and "set run.dir" in told


@pytest.mark.parametrize("killed", ["command", "torchrun"])
def test_a_killed_launcher_leaves_no_process_behind(made: Path, killed: str) -> None:
    name = f"orphans-of-{killed}"
    given, run = another(made, name), made.parent / "runs" / name
    keys = "parallel.replicate=2", "train.steps=100000", "checkpoint.every=100000"
    one = command("train", *given, *(part for key in keys for part in ("--set", key)))
    with subprocess.Popen(one, stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(run, 2)
        ranks = [pid_of_rank(run, rank) for rank in (0, 1)]
        assert all(map(lives, ranks))
        if killed == "command":
            process.send_signal(signal.SIGKILL)
        else:
            os.kill(torchrun_of(process.pid), signal.SIGKILL)
        said = process.communicate(timeout=3 * SECONDS)[1]
    deadline = time.monotonic() + 3 * SECONDS
    while any(map(lives, ranks)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(lives, ranks)) and "Traceback" not in said
    if killed == "torchrun":
        assert process.returncode == 1 and len(errors(said)) == 1
    again = subprocess.run([*one, "--set", "train.steps=4"], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    found = [one for one in read_json_lines(run / "incidents.jsonl") if one["what"] == "lost"]
    assert [one["rank"] for one in found] == [0] and found[0]["step"] >= 1, "one loss of the node"


def torchrun_of(command: int) -> int:
    """The program that a command started, the fork that it stands for under tests/warm.py too."""
    return next(pid for pid in tree(command) if b"launch.torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes())
