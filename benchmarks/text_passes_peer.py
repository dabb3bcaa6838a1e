"""The peers' side of text_passes.py, for a Python that has them: prints MB per CPU-second as one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time


def main() -> None:
    import py3langid
    from datatrove.data import Document
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
    from datatrove.pipeline.formatters.pii import PIIFormatter

    job = json.loads(Path(sys.argv[1]).read_text())
    texts, folder = job["texts"], Path(sys.argv[1]).parent / "index"
    folder.mkdir()
    config = NGramsDecontConfig(n_grams=job["ngram"])
    # Calls the parts of the indexer's run(): the class itself requires lighteval, which would download items.
    indexer = object.__new__(NGramsDecontIndexer)
    decontaminate = NGramsDecontFilter(str(folder), config=config)
    indexer.config, indexer.tokenizer, indexer.hash_func = config, decontaminate.tokenizer, decontaminate.hash_func
    hashes = {hash_ for item in job["items"] for text in item for hash_ in indexer.compute_hashes(text)}
    decontaminate._index_hashes = dict.fromkeys(hashes, "sets")
    formatter = PIIFormatter()
    sides: dict[str, Callable[[str], object]] = {
        "py3langid, first 2,000 characters": lambda text: py3langid.classify(text[:2000]),
        "py3langid, whole text": py3langid.classify,
        "datatrove PII (e-mail and IP)": formatter.format,
        "datatrove decontamination": lambda text: decontaminate.filter(Document(text=text, id="")),
    }
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    best = dict.fromkeys(sides, 0.0)
    for run in sides.values():
        run(texts[0])
    for _ in range(job["rounds"]):
        for name, run in sides.items():
            started = process_time()
            for text in texts:
                run(text)
            best[name] = max(best[name], megabytes / (process_time() - started))
    print(json.dumps(best))


if __name__ == "__main__":
    main()
