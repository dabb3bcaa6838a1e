"""datatrove's side of rules.py: its filters on the same documents, in an environment with datatrove.

    PYTHON benchmarks/rules_datatrove.py DOCUMENTS SPLIT OUT

DOCUMENTS is JSONL with the texts. SPLIT is JSONL with our words (first and last character of each) and our number of sentences
for each line that C4 keeps. Each filter is timed as datatrove ships it, and then decides a second time with our words instead of
its own. OUT receives the decisions and the CPU seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datatrove.pipeline.filters.c4_filters as c4
import datatrove.pipeline.filters.fineweb_quality_filter as fineweb
import datatrove.pipeline.filters.gopher_quality_filter as quality
import datatrove.pipeline.filters.gopher_repetition_filter as repetition
from datatrove.data import Document
from datatrove.utils.text import split_into_parts, split_into_words

WITH = {
    "gopher_quality": (quality, quality.GopherQualityFilter),
    "gopher_repetition": (repetition, repetition.GopherRepetitionFilter),
    "c4": (c4, c4.C4QualityFilter),
    "fineweb": (fineweb, fineweb.FineWebQualityFilter),
}


def decide(filter_: Any, document: Document) -> str | None:
    """Return the reason a document is rejected, or None if it is kept."""
    try:
        result = filter_.filter(document)
    except ZeroDivisionError:
        return "ZeroDivisionError"
    kept, reason = result if isinstance(result, tuple) else (result, "rejected")
    return None if kept else reason


def main(documents_path: str, split_path: str, out_path: str) -> None:
    texts = [json.loads(line)["text"] for line in Path(documents_path).read_text(encoding="utf-8").splitlines()]
    splits = [json.loads(line) for line in Path(split_path).read_text(encoding="utf-8").splitlines()]
    split_into_words("The tokenizer is loaded before the clock starts.")
    found: dict[str, Any] = {"seconds": {}, "own": {}, "ours": {}, "texts": {}}
    for name, (_, make) in WITH.items():
        decisions, edited, filter_ = [], [], make()
        split_into_parts.cache_clear()
        started = time.process_time()
        for text in texts:
            document = Document(text=text, id="")
            decisions.append(decide(filter_, document))
            edited.append(document.text if decisions[-1] is None else None)
        found["seconds"][name] = time.process_time() - started
        found["own"][name] = decisions
        if name == "c4":
            found["texts"][name] = edited
    split_into_parts.cache_clear()
    filters = [make() for _, make in WITH.values()]
    together = []
    started = time.process_time()
    for text in texts:
        document = Document(text=text, id="")
        reason = None
        for filter_ in filters:
            reason = decide(filter_, document)
            if reason is not None:
                break
        together.append(reason)
    found["seconds"]["all"] = time.process_time() - started
    found["own"]["all"] = together

    own_words = [split_into_words(text) for text in texts]
    our_words = [
        [text[first:last] for first, last in zip(*split["words"], strict=True)]
        for text, split in zip(texts, splits, strict=True)
    ]
    found["same_words"] = [own == ours for own, ours in zip(own_words, our_words, strict=True)]
    current: dict[str, Any] = {}
    for name, (module, make) in WITH.items():
        module.split_into_words = lambda text, language: current["words"]  # type: ignore[attr-defined]
        module.split_into_sentences = (  # type: ignore[attr-defined]
            lambda line, language: [line] * current["sentences"].get(line, -(10**6))
        )
        decisions, filter_ = [], make()
        for text, words, split in zip(texts, our_words, splits, strict=True):
            current.update(words=words, sentences=split["sentences"])
            decisions.append(decide(filter_, Document(text=text, id="")))
        found["ours"][name] = decisions
    Path(out_path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
