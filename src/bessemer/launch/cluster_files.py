"""Files that start a training on a cluster: a Slurm batch script with its recipe, or a Kubernetes JobSet. Both call torchrun.

train.sbatch has one task per node, which manages the processes of the node (sbatch(1), srun(1), scontrol(1) of Slurm 22.05 to
24.11):

- `--signal=B:USR1@N` reaches only the batch shell, which passes it on, but not as SIGTERM, on which srun kills its tasks.
- A job that ends with 75 has saved everything but is not done, and a job that was killed may have saved something.
  `scontrol requeue` queues it again under the same number.
- `--requeue` lets Slurm do the same after a node failure or a preemption.

jobset.yaml has one pod per node on one volume (jobset.x-k8s.io/v1alpha2 of JobSet 0.10, batch/v1 Job). It is a JobSet and not a
PyTorchJob because a Job's podFailurePolicy can declare that exit code 75 is no failure; a PyTorchJob (Training Operator v1)
treats 1 to 127 as final. Kubeflow's Trainer v2 makes JobSets as well.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from bessemer.common import extensions
from bessemer.common.console import counted
from bessemer.common.environment import sbatch_path
from bessemer.common.errors import BessemerError, InputError, require_import
from bessemer.recipe import Recipe, dump
from bessemer.run.files import write_atomic

CPUS_PER_PROCESS, PORT = 8, 29500
TIME_LIMIT, EARLY_SECONDS = "24:00:00", 60  # Slurm may signal a job this much earlier than requested


def write_files(
    recipe: Recipe, on: str, folder: Path, base: Path | None = None, devices_per_node: int | None = None
) -> list[Path]:
    """Write the files of a launch into a folder, and return their paths, the one to submit last.

    Args:
        recipe: The recipe.
        on: "slurm" or "kubernetes".
        folder: The folder to write to.
        base: The folder of the recipe's file, to which its relative paths refer. On Kubernetes they refer to the mount.
        devices_per_node: The devices per node of the recipe's device, used if cluster.devices_per_node is not set.

    Raises:
        InputError: The recipe does not fit the cluster.
    """
    recipe = with_nodes(recipe, devices_per_node)
    folder = folder.absolute()
    if on == "kubernetes":
        texts = {"jobset.yaml": job_set(recipe, base)}
    else:
        recipe = recipe.changed(run={"dir": str(Path(recipe.run.dir).expanduser().absolute())})
        texts = {"recipe.toml": dump(recipe), "train.sbatch": batch_script(recipe, folder)}
    try:
        # Slurm does not create the folder of its output, and loses the output.
        (folder / "logs" if on == "slurm" else folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); choose another --out DIR") from None
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def submit_command(script: Path) -> str:
    """Return the command that submits a file of `write_files`."""
    return f"{'kubectl apply -f' if script.suffix == '.yaml' else 'sbatch'} {shlex.quote(str(script))}"


def with_nodes(recipe: Recipe, devices_per_node: int | None = None) -> Recipe:
    """Return the recipe with cluster.nodes derived from the devices of a node, if it is not set.

    Raises InputError, with numbers that fit, if the processes do not divide among the nodes.
    """
    world, cluster, elastic = recipe.parallel.world, recipe.cluster, recipe.parallel.elastic
    nodes, largest = cluster.nodes, world
    if recipe.train.device != "cpu":
        per_node = cluster.devices_per_node or devices_per_node
        if per_node and "nodes" not in cluster.model_fields_set:
            nodes = -(-world // per_node)
        largest = per_node or 16  # no known node has more GPUs
    fits = [n for n in range(1, world + 1) if world % n == 0 and world // n <= largest]
    if nodes not in fits:
        raise InputError(
            f"cluster.nodes = {nodes}: cannot divide {world} processes, at most {largest} per node; possible: {str(fits)[1:-1]}"
        )
    if cluster.min_nodes not in (None, nodes) and not elastic:
        raise InputError("cluster.min_nodes: fewer nodes than cluster.nodes need parallel.elastic = true; set it")
    return recipe.changed(cluster={"nodes": nodes})


def batch_script(recipe: Recipe, folder: Path) -> str:
    """Return the Slurm script of a recipe that is recipe.toml in `folder`, an absolute path that all nodes see.

    Raises InputError for a time limit so short that the job would be stopped at its start.
    """
    options = [re.fullmatch(r"(?:--time[= ]|-t ?) *(\S+)", option) for option in recipe.cluster.sbatch]
    limit = [TIME_LIMIT, *(match[1] for match in options if match)][-1]
    if _seconds(limit) <= (needed := recipe.cluster.save_seconds + EARLY_SECONDS):
        raise InputError(f"cluster.sbatch: --time={limit} is below cluster.save_seconds + 60 s = {needed} s; raise it")
    logs = sbatch_path(folder / "logs", "%x-%j.out")
    return _render("train.sbatch", recipe, folder=folder, output=logs, time_limit="" if any(options) else limit)


def job_set(recipe: Recipe, base: Path | None = None) -> str:
    """Return the Kubernetes YAML of a launch: a ConfigMap with the recipe, and a JobSet whose pods include `cluster.pod`.

    `base` is the folder of the recipe's file. Paths in it become relative to the mounted volume. Raises InputError if
    [cluster] lacks the image or the volume claim, or a pod has less memory than it needs.
    """
    cluster = recipe.cluster
    claim, _, mount = (*cluster.mounts, "")[0].partition(":")
    if cluster.image is None or len(cluster.mounts) != 1 or not re.fullmatch("[a-z0-9.-]+:/.*", cluster.mounts[0]):
        raise InputError(
            'cluster.image, cluster.mounts: Kubernetes needs both; set an image and one claim, such as ["runs:/data"]'
        )
    with require_import("jobset.yaml needs PyYAML; install it with: pip install 'bessemer[report]'", BessemerError):
        import yaml  # type: ignore[import-untyped]

    # The name must be a DNS label that starts with a letter, below 63 characters with the suffixes of pods.
    name = re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")
    name = (name if name[:1].isalpha() else f"run-{name}")[:40].strip("-")
    toml = dump(recipe)
    if base is not None:
        toml = re.sub(rf'"(hf:)?{re.escape(str(base.resolve()))}/', r'"\1', toml)
    manifests = _render("jobset.yaml", recipe, name=name, recipe_toml=toml, claim=claim, mount=mount)
    config, jobs = yaml.safe_load_all(manifests)
    template = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"] = merge(template["spec"], cluster.pod)
    _require_memory(template["spec"])

    # Block style only for ASCII: readers of YAML disagree about which other characters end a line.
    def write_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text and text.isascii() else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(str, write_text)
    written = yaml.dump_all([config, jobs], Dumper=dumper, sort_keys=False, width=1000)
    return f"# Written by `bessemer launch`. It needs the JobSet controller: https://jobset.sigs.k8s.io\n{written}"


def merge(base: Any, more: Any) -> Any:
    """Merge settings into a manifest: tables by key, lists of named tables by name. Any other value replaces the existing one."""
    if isinstance(base, dict) and isinstance(more, dict):
        return base | {key: merge(base.get(key), value) for key, value in more.items()}
    if type(base) is type(more) is list and all(isinstance(item, dict) and "name" in item for item in [*base, *more]):
        by_name = [{item["name"]: item for item in items} for items in (base, more)]
        return list(merge(*by_name).values())
    return more


def _require_memory(pod: dict[str, Any]) -> None:
    """Raise InputError if a pod's memory limit is below its request or /dev/shm, which counts against it."""
    train = next(container for container in pod["containers"] if container["name"] == "train")
    limit = train["resources"].get("limits", {}).get("memory")
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")["emptyDir"]["sizeLimit"]
    needs = {"requests.memory": train["resources"]["requests"]["memory"], "/dev/shm (volume shared-memory)": shared}
    for what, amount in needs.items() if limit is not None else ():
        if _bytes(limit) < _bytes(amount):
            raise InputError(f"cluster.pod: the memory limit {limit} of container train is below {what} = {amount}")


def _bytes(quantity: str | float) -> float:
    """Return the bytes of a Kubernetes quantity, such as 16Gi, 1.5G or 1000."""
    match = re.fullmatch(r"([0-9.]+)(?:([kKMGTPE])(i?))?", str(quantity))
    if match is None:
        raise InputError(f"cluster.pod: {quantity} is not an amount of memory; write, for example, 64Gi")
    return float(match[1]) * float(1024 if match[3] else 1000) ** " KMGTPE".index((match[2] or " ").upper())


def _seconds(limit: str) -> float:
    """Return the seconds of an sbatch time limit (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S); infinite for no limit."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        return float("inf")
    units = (86400, 3600, 60, 1)[0 if "-" in limit else 1 if limit.count(":") == 2 else 2 :]
    return sum(int(part) * unit for part, unit in zip(re.split("[-:]", limit), units, strict=False))


def _render(template: str, recipe: Recipe, **more: Any) -> str:
    with require_import(f"{template} needs jinja2; install it with: pip install 'bessemer[report]'", BessemerError):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    cluster = recipe.cluster
    min_nodes = cluster.min_nodes or cluster.nodes
    return environment.get_template(f"{template}.jinja").render(
        recipe=recipe, cluster=cluster,
        size=f"{counted(recipe.parallel.world, 'process')} on {counted(cluster.nodes, 'node')}", min_nodes=min_nodes,
        per_node=recipe.parallel.world // cluster.nodes, quote=lambda value: shlex.quote(str(value)),
        is_elastic=min_nodes != cluster.nodes,  # the other nodes then survive the end of one node
        port=PORT, cpus_per_process=CPUS_PER_PROCESS, python=sys.executable,
        trusted_variable=extensions.TRUSTED, trusted_code=os.environ.get(extensions.TRUSTED), **more,
    )  # fmt: skip
