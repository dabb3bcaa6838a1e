"""A simulated Slurm without accounting: a folder with its commands to put on the PATH.

`sbatch` starts a process that runs the jobs of the array with bash, at most CORES at a time, as the controller would. Each job
has its number in the environment and writes its output to the file that the script names. Job states are files in FOLDER/ARRAY/.

    python slurm_commands.py FOLDER COMMAND ARGUMENT...
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

CORES = 2
COMMANDS = ("sbatch", "squeue", "scancel")


def install(folder: Path) -> Path:
    """Write the commands into FOLDER/bin and return it."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    for name in COMMANDS:
        path = binaries / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {name} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return binaries


def sbatch(folder: Path, script: Path) -> int:
    if (folder / "refuses").exists():
        print("sbatch: error: Batch job submission failed: Invalid partition name specified", file=sys.stderr)
        return 1
    number = 1 + sum(path.name.isdecimal() for path in folder.iterdir())
    array = folder / str(number)
    array.mkdir()
    (array / "script").write_text(script.read_text())
    [(last, _)] = re.findall(r"^#SBATCH --array=0-(\d+)%(\d+)$", script.read_text(), re.MULTILINE)
    for job in range(int(last) + 1):
        (array / f"{job}.state").write_text("PENDING")
    command = [sys.executable, __file__, str(folder), "control", str(number)]
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(number)
    return 0


def control(array: Path) -> int:
    """Run the jobs of an array."""
    script = (array / "script").read_text().replace("%%", "%")
    output = re.findall(r'^#SBATCH --output="(.*)"$', script, re.MULTILINE)[0]
    running: dict[str, subprocess.Popen[bytes]] = {}
    waiting = sorted((path.stem for path in array.glob("*.state")), key=int)
    while waiting or running:
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                if state_of(array, job) == "RUNNING":
                    state = "FAILED" if process.returncode > 0 else "NODE_FAIL"
                    set_state(array, job, "COMPLETED" if process.returncode == 0 else state)
        while waiting and len(running) < CORES:
            if state_of(array, job := waiting.pop(0)) == "PENDING":
                environment = {**os.environ, "SLURM_ARRAY_TASK_ID": job}
                with open(output.replace("%a", job), "wb") as log:
                    running[job] = subprocess.Popen(["bash", array / "script"], stdout=log, stderr=log, env=environment)
                set_state(array, job, "RUNNING")
                (array / f"{job}.pid").write_text(str(running[job].pid))
        time.sleep(0.02)
    return 0


def set_state(array: Path, job: str, state: str) -> None:
    """Write a state atomically, since `squeue` reads at any time."""
    (array / f"{job}.new").write_text(state)
    (array / f"{job}.new").replace(array / f"{job}.state")


def state_of(array: Path, job: str) -> str:
    return (array / f"{job}.state").read_text()


def states(array: Path) -> list[str]:
    return [path.read_text() for path in sorted(array.glob("*.state"))]


def squeue(array: Path) -> int:
    if not array.exists():
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    print("\n".join(f"{path.stem}|{path.read_text()}|Priority" for path in array.glob("*.state")))
    return 0


def scancel(array: Path) -> int:
    for path in array.glob("*.state"):
        if path.read_text() in ("PENDING", "RUNNING"):
            set_state(array, path.stem, "CANCELLED")
            if (pid := path.with_suffix(".pid")).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid.read_text()), signal.SIGKILL)
    return 0


def main(folder: Path, command: str, *given: str) -> int:
    with open(folder / "calls", "a") as file:
        file.write(f"{command} {' '.join(given)}\n")
    if command == "sbatch":
        return sbatch(folder, Path(given[-1]))
    if command == "control":
        return control(folder / given[0])
    if command == "scancel":
        return scancel(folder / given[-1])
    return squeue(folder / next(word for word in given if word.startswith("--jobs=")).removeprefix("--jobs="))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
