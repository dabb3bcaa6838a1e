"""datatrove's side of corpus.py: a filter, the four MinHash stages and the tokenizer, run in sequence.

    PYTHON benchmarks/corpus_peer.py JOB.json

The job file names the input folder, a work folder, the tokenizer.json and its end-of-text token.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    work = Path(job["work"])
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64))
    filtered = str(work / "filtered")
    stages = [
        [
            JsonlReader(job["input"], id_key="id", text_key="text"),
            GopherRepetitionFilter(),
            JsonlWriter(filtered, output_filename="${rank}.jsonl", compression=None),
        ],
        [JsonlReader(filtered), MinhashDedupSignature(str(work / "signatures"), config=config)],
        [MinhashDedupBuckets(str(work / "signatures"), str(work / "buckets"), config=config)],
        [MinhashDedupCluster(str(work / "buckets"), str(work / "remove"), config=config)],
        [
            JsonlReader(filtered),
            MinhashDedupFilter(str(work / "remove")),
            JsonlWriter(str(work / "kept"), output_filename="${rank}.jsonl", compression=None),
        ],
        [
            JsonlReader(str(work / "kept")),
            DocumentTokenizer(
                str(work / "tokens"), tokenizer_name_or_path=job["tokenizer"], eos_token=job["end_of_text"]
            ),
        ],
    ]
    for number, stage in enumerate(stages):
        tasks = config.num_buckets if number == 2 else 1
        LocalPipelineExecutor(stage, tasks=tasks, workers=1, logging_dir=str(work / "logs" / str(number))).run()
    kept = [line for path in (work / "kept").glob("*.jsonl") for line in path.read_text().split("\n") if line]
    tokens = sum(path.stat().st_size for path in (work / "tokens").glob("*.ds")) // 2
    facts = {"version": version("datatrove"), "documents": len(kept), "tokens": tokens}
    (work / "answer.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
