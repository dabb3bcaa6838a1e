"""The memory of a node that checkpoints lie in: its agent holds the files, so that they outlive the processes that train.

In a folder of the node a checkpoint is a manifest and links to these files, and is read as one on a disk:

    memory/files.json                 the paths of the files, by process
    memory/ORIGIN/step-00000140/      manifest.json, links: what the ranks of node ORIGIN hold, this one or a neighbour
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bessemer.checkpoint.format import MANIFEST, PARTS
from bessemer.checkpoint.staging import HAS_MEMORY_FILES
from bessemer.interrupt import NODE
from bessemer.parallel.mesh import ProcessMesh
from bessemer.run import checkpoint_name, publish_folder, published, read_json, temporary_folder

FOLDER, HELD = "memory", "files.json"  # in the node's folder; its file that names the files of memory
SETS = 2  # of files that are written in turn; a set has a file for each of a checkpoint's parts


@contextmanager
def hold(node: Path, processes: int, replicas: int = 0) -> Iterator[None]:
    """Hold files of memory for the processes of a node while the block runs; they take no memory before they are written.

    Of each process: SETS sets for its own copies, and as many for those of each of `replicas` neighbours.
    """
    if not HAS_MEMORY_FILES:
        yield
        return
    handles = [os.memfd_create("bessemer") for _ in range(processes * (1 + replicas) * SETS * len(PARTS))]
    paths = iter([f"/proc/{os.getpid()}/fd/{one}" for one in handles])
    by_process = [
        [[[next(paths) for _ in PARTS] for _ in range(SETS)] for _ in range(1 + replicas)] for _ in range(processes)
    ]
    (node / FOLDER).mkdir()
    (node / FOLDER / HELD).write_text(json.dumps(by_process))
    try:
        yield
    finally:
        for handle in handles:
            os.close(handle)


@dataclass(frozen=True)
class NodeMemory:
    """The memory that the agent of this process's node holds. folder: of its checkpoints; sets: this process's files, first those
    of its own copies, then those of each neighbour's; local: rank on the node, of num_local in the mesh; node: its number."""

    folder: Path
    sets: list[list[list[str]]]
    local: int
    num_local: int
    node: int

    @classmethod
    def here(cls, mesh: ProcessMesh) -> NodeMemory | None:
        """That of this process; None where no agent of ours has started it, or the system has no files of memory."""
        folder = Path(os.environ[NODE]) / FOLDER if NODE in os.environ else None
        if folder is None or not (folder / HELD).exists():
            return None
        local, node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
        by_process = read_json(folder / HELD)
        num_local = min(len(by_process), mesh.world - (mesh.rank - local))  # the last processes of all may be spare
        return cls(folder, by_process[local], local, num_local, node)

    def checkpoints(self, origin: int) -> Path:
        """The folder of the checkpoints of a node's ranks."""
        return self.folder / str(origin)

    def held(self) -> set[tuple[int, int]]:
        """Step and origin of the checkpoints that are here."""
        origins = [int(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return {(step, origin) for origin in origins for step in published(self.checkpoints(origin))}

    def local_files(self, folder: Path) -> list[Path]:
        """The files of a checkpoint that this process hashes and sends: the node's processes divide those that are here."""
        return sorted(path for path in folder.iterdir() if path.is_symlink())[self.local :: self.num_local]

    def free_set(self, number: int = 0) -> list[str]:
        """The files of this process that no checkpoint consists of, for its own copies or those of neighbour `number` from 1."""
        used = {os.readlink(link) for link in self.folder.glob("*/step-*/*") if link.is_symlink()}
        return next(files for files in self.sets[number] if used.isdisjoint(files))

    def publish(self, origin: int, step: int, manifest: str, links: Mapping[str, str]) -> None:
        """Make a checkpoint of files of memory; of the processes of a node, the first does so. links: name -> path."""
        if self.local:
            return
        target = self.checkpoints(origin) / checkpoint_name(step)
        temporary = temporary_folder(self.checkpoints(origin), step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / MANIFEST).write_text(manifest)
        for name, path in links.items():
            (temporary / name).symlink_to(path)
        publish_folder(temporary, target)

    def forget_others(self, step: int | None = None, own_alone: bool = False) -> None:
        """Forget the checkpoints of all other steps, and with own_alone those of neighbours; the node's first process does so."""
        name = None if step is None else checkpoint_name(step)
        for path in self.folder.glob("*/step-*") if self.local == 0 else ():
            if path.name != name or (own_alone and path.parent != self.checkpoints(self.node)):
                shutil.rmtree(path)
