"""Files for a cluster, read by their own parsers, and the batch script run on this machine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainings import another, bessemer, errors, losses, wait_for_step

from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.common.errors import InputError
from bessemer.launch import cluster_files
from bessemer.recipe import Recipe, load

RECIPE = """
[run]
name = "Big.run_1"
dir = "{folder}/some runs"
[[corpus.sources]]
name = "docs"
format = "text"
paths = ["texts"]
[model]
depth = 4
[parallel]
shard = 8
replicate = 4
{parallel}
[cluster]
{nodes}
{cluster}
"""
FULL = """
min_nodes = 2
save_seconds = 120
sbatch = ["--cpus-per-task=96", "--mem=900G", "--time=1-12:00:00", "--partition=gpu,long", "--account=acme", "--qos=high",
          "--constraint=h100&ib"]
setup = ["module() {{ :; }}", "module load cuda/12.8"]
image = "registry.example.org/bessemer:1"
mounts = ["runs:/scratch"]
"""


def recipe(folder: Path, cluster: str = "", parallel: str = "", nodes: str = "nodes = 4") -> Recipe:
    path = folder / "big.toml"
    path.write_text(
        RECIPE.format(
            folder=folder, cluster=cluster.replace("{{", "{").replace("}}", "}"), parallel=parallel, nodes=nodes
        )
    )
    return load(path)


def sbatch_options(script: str) -> dict[str, str | None]:
    """Return the options as sbatch reads them: comment lines before the first other line; the last one of a name counts."""
    found: dict[str, str | None] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line)
            assert option is not None, line
            found[option[1]] = option[2]
        elif line and not line.startswith("#"):
            assert "#SBATCH" not in script.split(line, 1)[1], "sbatch does not read options after a command"
            break
    return found


@pytest.mark.parametrize("full", [False, True])
def test_the_batch_script_is_read_by_bash_and_by_the_rules_of_sbatch(full: bool, tmp_path: Path) -> None:
    asked = recipe(tmp_path, FULL, "elastic = true") if full else recipe(tmp_path)
    folder = tmp_path / "it's 100% a launch-folder"
    script = cluster_files.write_files(asked, "slurm", folder)[-1]
    text, options = script.read_text(), sbatch_options(script.read_text())
    assert options["gpus-per-node"] == "8" and options["requeue"] is None
    assert options["output"] == f'"{str(folder).replace("%", "%%")}/logs/%x-%j.out"' and (folder / "logs").is_dir()
    if full:
        assert options["nodes"] == "2-4" and options["cpus-per-task"] == "96" and options["signal"] == "B:USR1@120"
        assert options["time"] == "1-12:00:00" and options["partition"] == "gpu,long"
        assert '--nnodes=2:"$SLURM_JOB_NUM_NODES" --nproc-per-node=8' in text and "--kill-on-bad-exit=0" in text
        assert text.count("--container-image=registry.example.org/bessemer:1") == 2, "of the step and of its outcome"
    else:
        assert options["nodes"] == "4" and options["mem"] == "0" and "partition" not in options
        assert options["cpus-per-task"] == "64", "slurm's own default is one core for all eight processes"
        assert "--nnodes=4 --nproc-per-node=8 --max-restarts=3" in text and "--kill-on-bad-exit=1" in text
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert shlex.split(cluster_files.submit_command(script)) == ["sbatch", str(script)]
    assert load(folder / "recipe.toml") == asked  # whatever folder the job starts in


@pytest.mark.parametrize(
    ("cluster", "nodes", "each"),
    [('device = "A100"', 8, 8), ('device = "GB200"', 16, 4), ("devices_per_node = 16", 4, 16), ("nodes = 4", 4, 16)],
)
def test_the_number_of_nodes_follows_from_the_processes(cluster: str, nodes: int, each: int, tmp_path: Path) -> None:
    asked = recipe(tmp_path, cluster, "pipeline = 2", nodes="")
    assert asked.parallel.world == 64
    assert run_command(["launch", str(tmp_path / "big.toml"), "--on", "slurm", "--out", str(tmp_path / "out")]) == 0
    options = sbatch_options((tmp_path / "out" / "train.sbatch").read_text())
    assert (options["nodes"], options["gpus-per-node"]) == (str(nodes), str(each))
    assert load(tmp_path / "out" / "recipe.toml").cluster.nodes == nodes


def jobset(asked: Recipe, folder: Path, base: Path | None = None) -> tuple[Any, Any]:
    (path,) = cluster_files.write_files(asked, "kubernetes", folder, base)
    config, found = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return config, found


@pytest.mark.parametrize("full", [False, True])
def test_the_jobset_starts_a_pod_for_each_node(full: bool, tmp_path: Path) -> None:
    few = 'image = "registry.example.org/bessemer:1"\nmounts = ["runs:/data"]'
    asked = recipe(tmp_path, FULL if full else few, "elastic = true" if full else "")
    config, found = jobset(asked, tmp_path / "out")
    (tmp_path / "read.toml").write_text(config["data"]["recipe.toml"])
    assert load(tmp_path / "read.toml") == asked
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert found["kind"] == "JobSet" and job["completions"] == job["parallelism"] == 4
    assert (pod["restartPolicy"], job["podReplacementPolicy"]) == ("Never", "Failed"), "a podFailurePolicy needs both"
    assert job["backoffLimit"] == (12 if full else 3), "a pod that is lost is replaced, and waited for"
    rules = [
        (rule["action"], *rule.get("onExitCodes", {}).get("values", ())) for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [("Ignore",), ("Ignore", 75), ("FailJob", 2)]
    assert container["name"] == "train" and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["requests"] == {"cpu": "64", "memory": "256Gi"}
    (data,) = (volume for volume in pod["volumes"] if volume["name"] == "data")
    assert data["persistentVolumeClaim"]["claimName"] == "runs"
    name, network = found["metadata"]["name"], found["spec"]["network"]
    script = container["command"][-1]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    assert f'--rdzv-endpoint="{name}-node-0-0.{network["subdomain"]}:' in script
    assert ("--nnodes=2:4 " if full else "--nnodes=4 ") in script


@pytest.mark.parametrize(
    ("run", "name"), [("7b", "run-7b"), ("on", "on"), ("A" * 60 + ".1", "a" * 40), ("1.", "run-1")]
)
def test_run_names_become_valid_kubernetes_names(run: str, name: str, tmp_path: Path) -> None:
    asked = recipe(tmp_path, FULL, "elastic = true").changed(run={"name": run})
    config, found = jobset(asked, tmp_path / "out")
    assert (config["metadata"]["name"], found["metadata"]["name"]) == (name, name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(f"{name}-node-0-999") <= 63


def test_pod_settings_are_merged_and_unusual_texts_survive(tmp_path: Path) -> None:
    """The recipe contains letters that YAML reads as line breaks; its paths stay relative to the mount."""
    pod = """
[cluster.pod]
automountServiceAccountToken = false
securityContext = {runAsUser = 1000}
[[cluster.pod.containers]]
name = "train"
env = [{name = "WANDB_API_KEY", valueFrom = {secretKeyRef = {name = "wandb", key = "key"}}}]
resources = {limits = {memory = "300Gi"}}
[[cluster.pod.volumes]]
name = "shared-memory"
emptyDir = {sizeLimit = "64Gi"}
"""
    (tmp_path / "texts").mkdir()
    own = recipe(tmp_path, FULL + pod.replace("{", "{{").replace("}", "}}"), "elastic = true")
    paths = (str(tmp_path / "texts"), "/data/all", "a\u2028b\x85c", "no")
    own = own.changed(corpus={"sources": (own.corpus.sources[0].changed(paths=paths),)})
    config, found = jobset(own, tmp_path / "launch", tmp_path)
    assert tomllib.loads(config["data"]["recipe.toml"])["corpus"]["sources"][0]["paths"] == ["texts", *paths[1:]]
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"] == {"runAsUser": 1000}
    assert {"POD_IP", "WANDB_API_KEY"} <= {variable["name"] for variable in container["env"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "300Gi"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"} and len(volumes) == 3


LIMIT = """image = "a"
mounts = ["runs:/data"]
[[cluster.pod.containers]]
name = "train"
resources = {{requests = {{memory = "8Gi"}}, limits = {{memory = "9G"}}}}
"""


@pytest.mark.parametrize(
    ("on", "cluster", "says"),
    [
        ("slurm", "", "cluster.nodes = 3: .*: 2, 4, 8"),
        ("slurm", "min_nodes = 2", "parallel.elastic"),
        ("slurm", "devices_per_node = 4", "cluster.nodes"),
        ("slurm", 'sbatch = ["--time=0:06:00"]', "cluster.save_seconds"),
        ("slurm", 'sbatch = ["-t 6"]', "--time"),
        ("slurm", 'save_seconds = 200000\nsbatch = ["--time 1-12"]', "cluster.sbatch"),
        ("kubernetes", 'mounts = ["runs:/data"]', "cluster.image"),
        ("kubernetes", 'image = "a"', "cluster.mounts"),
        ("kubernetes", 'image = "a"\nmounts = ["/here:/there"]', "cluster.mounts"),
        ("kubernetes", LIMIT, "/dev/shm"),
        ("kubernetes", LIMIT.replace("8Gi", "100Gi"), "requests.memory"),
    ],
)
def test_a_recipe_that_does_not_fit_the_cluster_is_one_error(on: str, cluster: str, says: str, tmp_path: Path) -> None:
    asked = recipe(tmp_path, cluster)
    if "nodes = 3" in says:
        asked = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"nodes": 3})})
    with pytest.raises(InputError, match=says):
        cluster_files.write_files(asked, on, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key", ["parallel.tensor=3", "parallel.expert=2", "train.global_batch_tokens=4096", "cluster.devices_per_node=16"]
)
def test_a_layout_that_a_plan_rejects_is_not_launched(key: str, tmp_path: Path) -> None:
    recipe(tmp_path, 'device = "H100"')
    for command in (["plan"], ["launch", "--on", "slurm", "--out", str(tmp_path / "out")]):
        assert run_command([*command, str(tmp_path / "big.toml"), "--set", key]) == 2
    assert not (tmp_path / "out").exists()


def test_a_key_cannot_inject_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    given = ["launch", str(tmp_path / "big.toml"), "--on", "slurm", "--out", str(tmp_path / "out")]
    for option in ("gpu", "--partition=gpu\n#SBATCH --uid=0"):
        assert run_command([*given, "--set", f"cluster.sbatch={json.dumps([option])}"]) == 2
        assert "cluster.sbatch" in capsys.readouterr().err
    assert run_command([*given[:-1], str(tmp_path / "a\nb")]) == 2, "sbatch reads a line"
    assert run_command([*given, "--set", 'cluster.sbatch=["--time=UNLIMITED"]']) == 0
    assert f"sbatch {tmp_path}/out/train.sbatch" in capsys.readouterr().err


SRUN = """#!{python}
# As srun: its own options first; then the command once a node. A signal goes to all, but SIGTERM kills them (srun(1)).
import os, signal, subprocess, sys, time
given = sys.argv[1:]
while given[0].startswith("--"):
    given = given[1:]
tasks = [subprocess.Popen(given) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
print(*[task.pid for task in tasks], file=open("{folder}/tasks", "w"))
def forward(number, frame):
    for task in tasks:
        task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
while any([task.poll() is None for task in tasks]):
    if any(task.returncode for task in tasks):  # --kill-on-bad-exit
        forward(signal.SIGTERM, None)
    time.sleep(0.1)
print(*[task.returncode for task in tasks], file=open("{folder}/codes", "w"))
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1" in
  show) echo localhost ;;
  requeue) echo "$2" >> "{folder}/requeued" ;;
esac
"""


def test_the_batch_script_contains_the_code_that_its_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job runs the files as they were when the script was written, and no others."""
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    (tmp_path / "it's mine.py").write_text("")
    recipe(tmp_path)
    text = (tmp_path / "big.toml").read_text() + '\n[[corpus.filters]]\nuse = "it\'s mine.py:LongWords"\n'
    (tmp_path / "big.toml").write_text(text)
    script = cluster_files.write_files(load(tmp_path / "big.toml"), "slurm", tmp_path / "out")[1]
    (line,) = [line for line in script.read_text().splitlines() if line.startswith(f"export {extensions.TRUSTED}=")]
    printed = subprocess.run(["bash", "-c", f"{line}; printenv {extensions.TRUSTED}"], capture_output=True, check=True)
    assert list(json.loads(printed.stdout)) == [f"{tmp_path}/it's mine.py"]


@pytest.mark.parametrize("setup", ["false", "exit 3", "ls | grep nothing", "echo $NOT_SET"])
def test_a_failing_setup_ends_the_job(setup: str, tmp_path: Path) -> None:
    """The job exits with its code before anything is trained. An unset variable is no failure, but a step without a training is."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/sh\ntouch "{tmp_path}/{name}-ran"\n')
        (tmp_path / name).chmod(0o755)
    asked = recipe(tmp_path, f"setup = [{json.dumps(setup)}]")
    script = cluster_files.write_files(asked, "slurm", tmp_path / "out")[1]
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n",
    }  # fmt: skip
    done = subprocess.run(["bash", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == (3 if setup == "exit 3" else 1), done.stderr
    assert (tmp_path / "srun-ran").exists() == setup.startswith("echo")


@pytest.mark.long
def test_the_batch_script_trains_on_two_nodes_and_is_requeued(made: Path, tmp_path: Path) -> None:
    """Two small programs replace srun and scontrol: two "nodes" of one process each on this machine. The job is stopped, then the
    command of a node is killed, then it finishes.
    """
    for name, text in (
        ("srun", SRUN.format(python=sys.executable, folder=tmp_path)),
        ("scontrol", SCONTROL.format(folder=tmp_path)),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = another(made, "slurm")
    keys = "parallel.replicate=2", "cluster.nodes=2", "train.device=cpu", "train.steps=150", "checkpoint.every=50"
    sets = [part for key in keys for part in ("--set", key)]
    done = bessemer("launch", *given, *sets, "--on", "slurm", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    script = tmp_path / "out" / "train.sbatch"
    job = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost", "SLURMD_NODENAME": "localhost",
    }  # fmt: skip
    with subprocess.Popen(["bash", script], env=job, stderr=subprocess.PIPE, text=True) as batch:
        wait_for_step(made.parent / "runs" / "slurm", 3)
        batch.send_signal(signal.SIGUSR1)  # only to the batch shell, as --signal=B:USR1 does
        _, said = batch.communicate(timeout=240)
    assert batch.returncode == 0, said
    assert (tmp_path / "requeued").read_text().split() == [str(os.getpid())]
    assert (tmp_path / "codes").read_text().split() == ["0", "0"], (
        "the first to end would end the others, which may still save"
    )
    assert len(errors(said)) == 1 and "everything is saved" in said
    stopped_at = max(losses(made, "slurm"))
    assert 3 <= stopped_at < 150
    with subprocess.Popen(
        ["bash", script], env=job | {"SLURM_RESTART_COUNT": "1"}, stderr=subprocess.PIPE, text=True
    ) as batch:
        wait_for_step(made.parent / "runs" / "slurm", 54)
        os.kill(int((tmp_path / "tasks").read_text().split()[1]), signal.SIGKILL)
        _, said = batch.communicate(timeout=240)
    assert batch.returncode == 0 and (tmp_path / "requeued").read_text().count("\n") == 2, said
    again = job | {"SLURM_RESTART_COUNT": "2"}
    done = subprocess.run(["bash", script], env=again, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "150 steps, from step" in done.stderr and "next: bessemer evaluate" in done.stderr
    assert (tmp_path / "requeued").read_text().count("\n") == 2
    assert set(losses(made, "slurm")) == set(range(1, 151))
