"""Files that start a training on a cluster: a Slurm batch script with its recipe, or a Kubernetes JobSet.

train.sbatch, one task a node that manages the node's processes (sbatch(1), srun(1), scontrol(1) of Slurm 24.11):
- `--signal=B:USR1@N` reaches the batch shell alone, which passes it on; not as SIGTERM, on which srun kills its tasks.
- A job that ends with 75 has saved everything and is not done; `scontrol requeue` queues it again under its own number.
- `--requeue` lets Slurm itself do so after a node has failed or the job has been preempted.

jobset.yaml, one pod a node on one volume (jobset.x-k8s.io/v1alpha2 of JobSet 0.10, batch/v1 Job). A JobSet and not a PyTorchJob
because a Job's podFailurePolicy can say that exit code 75 is no failure; a PyTorchJob (Training Operator v1) counts 1 to 127 as
final. Kubeflow's Trainer v2 makes JobSets as well. Strings are quoted as JSON, which YAML reads.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.devices import find
from bessemer.recipe import Recipe, dump
from bessemer.run import write_atomic
from bessemer.terminal import counted, rendered

LARGEST_NODE = 16  # GPUs of a node, where the recipe does not say how many it has
CLAIM = re.compile(r"[a-z0-9.-]+")
MEMORY_PER_PROCESS = 32  # GiB: torch and CUDA take 4, and an asynchronous checkpoint a copy of the state
CPUS_PER_PROCESS, PORT, SHARED_MEMORY = 8, 29500, "16Gi"  # which NCCL uses within a node


def write(recipe: Recipe, on: str, folder: Path, base: Path | None = None) -> list[Path]:
    """Write them into a folder, and return their paths. base: the folder of the recipe's file, from which its relative paths
    were taken; on Kubernetes they are taken from the mount. Raises InputError when the recipe does not fit the cluster."""
    recipe = with_nodes(recipe)
    require_nodes(recipe)
    folder = folder.absolute()
    if on == "kubernetes":
        texts = {"jobset.yaml": job_set(recipe, base)}
    else:
        here = recipe.run.model_copy(update={"dir": str(Path(recipe.run.dir).expanduser().absolute())})
        recipe = recipe.model_copy(update={"run": here})
        texts = {"recipe.toml": dump(recipe), "train.sbatch": batch_script(recipe, folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if on == "slurm":
            (folder / "logs").mkdir(exist_ok=True)  # Slurm does not create it, and loses the output
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with --out DIR"
        ) from None
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def with_nodes(recipe: Recipe) -> Recipe:
    """The recipe with cluster.nodes derived from what a node has, where it is left out.

    Raises InputError for more processes on a node than it has devices.
    """
    world, cluster = recipe.parallel.world, recipe.cluster
    if recipe.train.device == "cpu":
        return recipe
    catalogue = None if cluster.catalogue is None else Path(cluster.catalogue)
    device = None if cluster.device is None else find(cluster.device, catalogue)
    per_node = cluster.devices_per_node or (device and device.per_node)
    nodes = cluster.nodes
    if per_node and "nodes" not in cluster.model_fields_set:
        nodes = -(-world // per_node)
    each = world // nodes
    if each > (per_node or LARGEST_NODE):
        on = counted(nodes, "node")
        has = f"a node has {per_node}" if per_node else f"a node with more than {LARGEST_NODE} GPUs would be a rare one"
        raise InputError(
            f"cluster.nodes: {world} processes on {on} are {each} on each, but {has}; set cluster.nodes = "
            f"{-(-world // (per_node or 8))}, or cluster.devices_per_node"
        )
    return recipe.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def require_nodes(recipe: Recipe) -> None:
    """Raise InputError, with numbers that fit, when the processes do not divide among the nodes."""
    layout, cluster = recipe.parallel, recipe.cluster
    if layout.world % cluster.nodes:
        fits = [n for n in range(1, layout.world + 1) if layout.world % n == 0]
        raise InputError(
            f"cluster.nodes = {cluster.nodes} does not divide the {counted(layout.world, 'process')} of [parallel]; possible: "
            f"{', '.join(map(str, fits[:12]))}"
        )
    if cluster.min_nodes not in (None, cluster.nodes) and not layout.elastic:
        raise InputError(
            "cluster.min_nodes: fewer nodes need parallel.elastic = true, which lets the layout follow them"
        )


def batch_script(recipe: Recipe, folder: Path) -> str:
    """The Slurm script of a recipe that is recipe.toml in `folder`, an absolute path that all nodes see."""
    output = f"{folder}/logs/%x-%j.out"
    if shlex.quote(output) != output and any(letter.isspace() for letter in output):
        output = f'"{output}"'  # in an #SBATCH line only double quotes hold words together
    return _rendered("train.sbatch", recipe, folder=str(folder), output=output, python=sys.executable)


def job_set(recipe: Recipe, base: Path | None = None) -> str:
    """Return the ConfigMap with the recipe and the JobSet. Raises InputError when [cluster] lacks the image or the claim."""
    if recipe.cluster.image is None:
        raise InputError(
            "cluster.image: missing; kubernetes needs the container image with bessemer in it, for example "
            'cluster.image = "registry.example.org/bessemer:1"'
        )
    claim, _, mount = (*recipe.cluster.mounts, "")[0].partition(":")
    if len(recipe.cluster.mounts) != 1 or not CLAIM.fullmatch(claim) or not mount.startswith("/"):
        raise InputError(
            "cluster.mounts: kubernetes needs the volume claim of the run folder and where it is mounted, for example "
            'cluster.mounts = ["runs:/data"]'
        )
    # A DNS label; with the suffixes of pods it must stay under 63 characters.
    name = re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")[:40].strip("-") or "run"
    toml = dump(recipe).rstrip()
    if base is not None:
        toml = re.sub(rf'"(hf:)?{re.escape(str(base.resolve()))}/', r'"\1', toml)
    return _rendered(
        "jobset.yaml", recipe, name=name, recipe_toml=toml, memory_per_process=MEMORY_PER_PROCESS, claim=claim, mount=mount,
        shared_memory=SHARED_MEMORY,
    )  # fmt: skip


def _rendered(template: str, recipe: Recipe, **more: Any) -> str:
    cluster = recipe.cluster
    min_nodes = cluster.min_nodes or cluster.nodes
    return rendered(
        Path(__file__).with_name(f"{template}.jinja"), recipe=recipe, cluster=cluster, json=json.dumps,
        quote=lambda value: shlex.quote(str(value)), per_node=recipe.parallel.world // cluster.nodes, min_nodes=min_nodes,
        is_elastic=min_nodes != cluster.nodes,  # then the end of one node is not the end of the others
        has_gpus=recipe.train.device != "cpu", port=PORT, cpus_per_process=CPUS_PER_PROCESS, **more,
    )  # fmt: skip
