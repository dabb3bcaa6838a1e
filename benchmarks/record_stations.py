"""Count the modules that one record of a crawl passes from the archive to a token shard.

A page with a marked sentence is built into a corpus and tokens in this process, with the default rules. The script records with
`sys.setprofile` each module of the package with a function that receives or returns the marked text or its token ids: in a
string, bytes, an array, a table, or an object that contains one. It stops once the ids are in a shard.

    PYTHONPATH=src python benchmarks/record_stations.py [--functions]
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

import bessemer
from bessemer.corpus import pipeline
from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory
from bessemer.tokens import build

PACKAGE = Path(bessemer.__file__).parent
LAST = "tokens/shards"  # prefix of the last module's name
WORDS = [
    "water",
    "house",
    "river",
    "small",
    "large",
    "green",
    "after",
    "before",
    "under",
    "never",
    "always",
    "through",
    "people",
]
MARK = " quartz walrus jigsaw zephyr oblique fjord "  # in one page only
DEPTH = 3  # levels of nested containers that are searched
RECIPE = """
[run]
name = "{name}"
dir = "{folder}"
[model]
depth = 2
[tokenizer]
vocabulary = 300
[tokens]
held_out = 0.1
[[corpus.sources]]
name = "crawl"
format = "warc"
paths = ["{folder}/crawl.warc.gz"]
"""


class Trace:
    """Profile function that records the modules that handle the marked text, in order, with their functions."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.stations: dict[str, dict[str, None]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        if any(name.startswith(LAST) for name in self.stations):
            return
        values = frame.f_locals.values() if event == "call" else [argument]
        if any(self._holds(value, DEPTH) for value in values):
            name = str(Path(code.co_filename).relative_to(PACKAGE))
            self.stations.setdefault(name, {})[code.co_qualname] = None

    def _holds(self, value: Any, depth: int) -> bool:
        if isinstance(value, str):
            return MARK in value
        if isinstance(value, bytes | bytearray | memoryview):
            return MARK.encode() in bytes(value)
        if isinstance(value, np.ndarray):
            is_ids = value.dtype.kind in "iu" and value.size >= len(self.ids)
            return is_ids and self.ids.tobytes() in value.astype(self.ids.dtype).tobytes()
        if isinstance(value, pa.Table | pa.RecordBatch):
            return any(self._holds(column, depth) for column in value.columns)
        if isinstance(value, pa.ChunkedArray):
            return any(self._holds(chunk, depth) for chunk in value.chunks)
        if isinstance(value, pa.Array):
            return any(buffer is not None and MARK.encode() in buffer.to_pybytes() for buffer in value.buffers())
        return depth > 0 and any(self._holds(inner, depth - 1) for inner in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    """Yield the values in a container or in an object of the package."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple):
        yield from list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))


def write_crawl(path: Path) -> None:
    """Write an archive of 60 pages, the first of which has the mark."""
    draw = np.random.default_rng(0)
    with gzip.open(path, "wb") as file:
        for number in range(60):
            lines = [
                f"{' '.join(draw.choice(WORDS, 40))}{MARK if number == line == 0 else ' '}end." for line in range(6)
            ]
            page = f"<html><body><main>{''.join(f'<p>{line}</p>' for line in lines)}</main></body></html>".encode()
            block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
            head = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Date: 2024-05-06T07:08:09Z\r\n"
                f"WARC-Target-URI: http://a.example/{number}\r\nContent-Type: application/http; msgtype=response\r\n"
                f"Content-Length: {len(block)}\r\n\r\n"
            )
            file.write(head.encode() + block + b"\r\n\r\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="name the functions of each module")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_crawl(Path(folder) / "crawl.warc.gz")
        ids = np.zeros(0, np.uint32)
        for name in ("first", "traced"):  # the first run gives the ids of the mark
            recipe, run = parse(RECIPE.format(name=name, folder=folder), name), RunDirectory(Path(folder) / name)
            trace = Trace(ids)
            if name == "traced":
                threading.setprofile(trace)
                sys.setprofile(trace)
            pipeline.build(recipe, run)
            build.build(recipe, run)
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            tokenizer = Tokenizer.from_file(str(run.tokens / "tokenizer.json"))
            ids = np.array(tokenizer.encode(MARK.rstrip(), add_special_tokens=False).ids, np.uint32)
    for name, functions in trace.stations.items():
        print(name, *([", ".join(functions)] if options.functions else []))
    print(f"a record passes {len(trace.stations)} modules")


if __name__ == "__main__":
    main()
