"""Precision and recall of text extraction on trafilatura's evaluation set of 990 annotated web pages.

Each page lists passages that its text must contain and passages that it must not contain (menus, comments, teasers). White space
is folded before comparing. Precision, recall and F1 are over all passages. A page counts as empty if no text was extracted
although it has more than 2,000 bytes of text outside scripts and styles.

    git clone https://github.com/adbar/trafilatura
    python benchmarks/extraction.py trafilatura --json FILE
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

from machine import describe

from bessemer.common.errors import NotText
from bessemer.corpus.extract.webpage import decode_html, page_text
from bessemer.recipe import Extract

EMPTY_BYTES = 2000
WAYS = {
    "default": Extract(),
    "with comments": Extract(comments=True),
    "all text": Extract(main_content=False),
    "trafilatura": Extract(engine="trafilatura"),
}
_NO_TEXT = re.compile(rb"<(script|style|head)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)


def fold(text: str) -> str:
    """Return the text with white space folded."""
    return " ".join(text.split())


def extract(raw: bytes, settings: Extract) -> str:
    """Return the text of a page; "" for a rejected page."""
    try:
        return page_text(decode_html(raw, max_undecodable=settings.max_undecodable_share), settings)
    except (NotText, UnicodeDecodeError):
        return ""


def score(pages: list[tuple[str, bytes, dict[str, Any]]], take: Callable[[bytes], str]) -> dict[str, Any]:
    """Return precision, recall and F1 over the passages, the empty pages, and MB per CPU-second."""
    right = wrong = missed = 0
    empty, started = list[str](), process_time()
    texts = [take(raw) for _, raw, _ in pages]
    seconds = process_time() - started
    for (name, raw, item), text in zip(pages, texts, strict=True):
        folded = fold(text)
        found = sum(fold(passage) in folded for passage in item["with"])
        right, missed = right + found, missed + len(item["with"]) - found
        wrong += sum(fold(passage) in folded for passage in item["without"])
        if not folded and len(b" ".join(_NO_TEXT.sub(b" ", raw).split())) > EMPTY_BYTES:
            empty.append(name)
    return {
        "precision": round(right / (right + wrong), 4),
        "recall": round(right / (right + missed), 4),
        "f1": round(2 * right / (2 * right + wrong + missed), 4),
        "empty": empty,
        "mb_per_cpu_second": round(sum(len(raw) for _, raw, _ in pages) / 1e6 / seconds, 1),
    }


def main() -> None:
    """Read the pages, print a row per extractor, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of trafilatura")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tests = arguments.checkout / "tests"
    pages = []
    for item in json.loads((tests / "evaldata.json").read_text(encoding="utf-8")).values():
        places = [tests / folder / item["file"] for folder in ("cache", "eval")]
        pages.append((item["file"], next(place for place in places if place.is_file()).read_bytes(), item))
    print(f"{len(pages)} pages, {sum(len(raw) for _, raw, _ in pages) / 1e6:.1f} MB")
    print(f"{'':16} precision  recall      F1  empty  MB of HTML per CPU-second")
    results = {}
    for name, settings in WAYS.items():
        found = results[name] = score(pages, lambda raw, settings=settings: extract(raw, settings))
        print(f"{name:16} {found['precision']:9.3f} {found['recall']:7.3f} {found['f1']:7.4f} {len(found['empty']):6d}  "
              f"{found['mb_per_cpu_second']:.1f}")  # fmt: skip
    if arguments.json:
        kept = {"machine": describe(), "pages": len(pages), "ways": results}
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
