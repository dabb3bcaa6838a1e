"""A build in a separate process with tiny partitions and buckets, which can kill itself at a file operation.

    python -m tests.corpus.build_corpus RECIPE RUN [MOMENT before|after] [pool|slurm|copies]

MOMENT is the number of the file operation at which the process kills itself, before or after it.
"""

import os
import sys
from pathlib import Path
from typing import Any

from bessemer.corpus import global_steps, partition, pipeline
from bessemer.corpus.dedup import task
from bessemer.corpus.readers import parts
from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from bessemer.run_tasks import slurm
from bessemer.storage import path
from tests.kills import kill_at


def small(pool: bool) -> None:
    """Split the work finely; workers do not read these numbers."""
    parts.LEAST_PART_BYTES = parts.PART_BYTES = 4000
    partition.PARTITION_BYTES = (8000, 8000)
    partition.BUCKET_BYTES = 20_000
    partition.RUN_BYTES = 10_000  # so that some partitions are written in several parts
    task.MEBIBYTE = 32  # so that there are several key ranges
    global_steps.GROUP_BYTES = 30_000  # so that some buckets are deduplicated together and others alone
    if pool:
        worker.SMALL_BYTES = 0


def cut_finely(patch: Any) -> None:
    """Split the work finely in this process until the patch is undone."""
    for module, names in {
        parts: ("LEAST_PART_BYTES", "PART_BYTES"), partition: ("PARTITION_BYTES", "BUCKET_BYTES"),
        task: ("MEBIBYTE",), global_steps: ("GROUP_BYTES",), worker: ("SMALL_BYTES",),
    }.items():  # fmt: skip
        for name in names:
            patch.setattr(module, name, getattr(module, name))
    small(pool=False)


if __name__ == "__main__":
    recipe, run, *more = sys.argv[1:]
    small("pool" in more or "slurm" in more)
    slurm.READ_SECONDS, slurm.ASK_SECONDS, slurm.SEEN_SECONDS = 0.05, 0.2, 0.5
    if more and more[0] not in ("pool", "slurm"):
        import pyarrow.parquet as pq

        operations = [
            *((os, name) for name in ("rename", "replace", "link", "fsync")),
            (pq.ParquetWriter, "write_table"),
        ]
        # Copies of files to a store, of which tasks make many.
        kill_at(int(more[0]), more[1], operations + [(path, "copy")] * ("copies" in more))
    pipeline.build(parse(Path(recipe).read_text(), "test"), RunDirectory(Path(run)))
