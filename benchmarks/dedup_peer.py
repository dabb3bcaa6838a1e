"""datatrove's four MinHash stages over JSONL files; dedup.py runs this in datatrove's Python.

    python dedup_peer.py JOB.json

The job file names the input folder, a work folder, bands, rows and the path of the answer. The CPU seconds of each stage are
those of this process (one task, one worker), without imports. Two results that dedup.py needs for judging are not timed: the
clusters, from a second run of the third stage that writes their numbers, and the shingle sets, which give the similar pairs by
datatrove's split into words.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from time import process_time

import numpy as np
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    work = Path(job["work"])
    config = MinhashConfig(
        n_grams=job["shingle_words"],
        num_buckets=job["bands"],
        hashes_per_bucket=job["rows"],
        hash_config=HashConfig(precision=64),
    )
    reader = JsonlReader(job["input"], id_key="id", text_key="text")
    signer = MinhashDedupSignature(str(work / "signatures"), config=config)
    signer.get_shingles("a few words so that the tokenizer is loaded before the clock starts")
    stages = {
        "signatures": [reader, signer],
        "buckets": [MinhashDedupBuckets(str(work / "signatures"), str(work / "buckets"), config=config)],
        "clusters": [MinhashDedupCluster(str(work / "buckets"), str(work / "remove"), config=config)],
        "filter": [
            reader,
            MinhashDedupFilter(str(work / "remove")),
            JsonlWriter(str(work / "kept"), output_filename="${rank}.jsonl", compression=None),
        ],
    }
    seconds = {}
    for name, stage in stages.items():
        started = process_time()
        tasks = job["bands"] if name == "buckets" else 1
        LocalPipelineExecutor(stage, tasks=tasks, workers=1, logging_dir=str(work / "logs" / name)).run()
        seconds[name] = process_time() - started
    kept = [
        json.loads(line)["id"]
        for path in sorted((work / "kept").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").split("\n")
        if line
    ]
    clusters = MinhashDedupCluster(str(work / "buckets"), str(work / "clusters"), config=config, save_cluster_id=True)
    LocalPipelineExecutor([clusters], tasks=1, workers=1, logging_dir=str(work / "logs" / "ids")).run()
    # Pairs of 32-bit numbers: the index of the document in the input (one task), and its cluster.
    numbers = np.fromfile(work / "clusters" / "000000.clusters", dtype="<u4").reshape(-1, 2)
    sets = {}
    for path in sorted(Path(job["input"]).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line:
                record = json.loads(line)
                sets[record["id"]] = np.unique(signer.get_shingles(record["text"]))
    np.savez(job["shingles"], **sets)
    names = list(sets)
    answer = {
        "version": version("datatrove"),
        "cpu_seconds": seconds,
        "kept": kept,
        "clusters": {names[place]: cluster for place, cluster in numbers.tolist()},
    }
    Path(job["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
