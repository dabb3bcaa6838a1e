"""The files that start a training on a cluster: the recipe as it stands now, and what its scheduler reads."""

from __future__ import annotations

from pathlib import Path

from bessemer.errors import InputError
from bessemer.launch import kubernetes, slurm
from bessemer.layout.devices import find
from bessemer.recipe import Recipe, dump
from bessemer.run import write_atomic

LARGEST_NODE = 16  # GPUs of a node, where the recipe does not say how many it has


def write(recipe: Recipe, on: str, folder: Path) -> list[Path]:
    """Write them into a folder, and return their paths. Raises InputError when the recipe does not fit the cluster."""
    recipe = with_nodes(recipe)
    require_nodes(recipe)
    folder = folder.absolute()
    if on == "kubernetes":
        texts = {"jobset.yaml": kubernetes.manifest(recipe)}
    else:
        here = recipe.run.model_copy(update={"dir": str(Path(recipe.run.dir).expanduser().absolute())})
        recipe = recipe.model_copy(update={"run": here})
        texts = {"recipe.toml": dump(recipe), "train.sbatch": slurm.script(recipe, folder)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if on == "slurm":
            (folder / "logs").mkdir(exist_ok=True)  # slurm does not make it, and loses the output
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written ({error.strerror}); choose another folder with --out DIR"
        ) from None
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def with_nodes(recipe: Recipe) -> Recipe:
    """The recipe with as many nodes as its processes fill, where it leaves cluster.nodes out and says what a node has.

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
        on = f"{nodes} node{'s' * (nodes > 1)}"
        has = f"a node has {per_node}" if per_node else f"a node with more than {LARGEST_NODE} GPUs would be a rare one"
        raise InputError(
            f"cluster.nodes: {world} processes on {on} are {each} on each, but {has}; set cluster.nodes = "
            f"{-(-world // (per_node or 8))}, or cluster.devices_per_node"
        )
    return recipe.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def require_nodes(recipe: Recipe) -> None:
    """Raise InputError, with what would fit, when the processes do not divide among the nodes."""
    layout, cluster = recipe.parallel, recipe.cluster
    if layout.world % cluster.nodes:
        fits = [n for n in range(1, layout.world + 1) if layout.world % n == 0]
        raise InputError(
            f"cluster.nodes = {cluster.nodes} does not divide the {layout.world} processes of [parallel]; possible: "
            f"{', '.join(map(str, fits[:12]))}"
        )
    if cluster.min_nodes not in (None, cluster.nodes) and not layout.elastic:
        raise InputError(
            "cluster.min_nodes: fewer nodes need parallel.elastic = true, which lets the layout follow them"
        )
