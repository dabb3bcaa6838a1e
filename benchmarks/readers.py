"""MB of HTML per CPU-second of reading crawls into text, compared with warcio and datatrove.

A folder of HTML pages is packed as Common Crawl packs them (one gzip member per record, each response with its request). Bessemer
is measured reading the archive alone, extracting all text, and extracting the main content. The peers run in a Python that has
them (`pip install warcio trafilatura datatrove[io]`): warcio with trafilatura's main content, and datatrove's WarcReader and
Trafilatura. They get the first --peer-pages pages only, since they take 30 times as long. Times are CPU seconds of separate
processes that take turns, so that other load has little effect.

    python benchmarks/readers.py --html FOLDER [--peer-python PYTHON] [--json FILE]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from machine import describe

OURS = """
from bessemer.corpus.readers.formats import warc
from bessemer.corpus.readers.base import build_reader
from bessemer.recipe import Corpus, Extract, Source
corpus = Corpus(extract=Extract(main_content=way == "main content"))
reader = build_reader(Source(name="s", paths=(path,)), "warc", corpus)
with open(path, "rb") as file:
    if way == "archive":
        warc._fill = lambda record, headers, block, settings: warc._parse_http(block, "none")
    found = [*reader.read_archive(file, None)]
    count, text = len(found), sum(len(record.text) for record in found)
"""

WARCIO = """
from warcio.archiveiterator import ArchiveIterator
import trafilatura
count = text = 0
with open(path, "rb") as file:
    for record in ArchiveIterator(file):
        if record.rec_type == "response":
            raw = record.content_stream().read()
            count += 1
            if way != "archive":
                text += len(trafilatura.extract(raw.decode("utf-8", "replace"), include_comments=False) or "")
"""

DATATROVE = """
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.readers import WarcReader
reader = WarcReader(os.path.dirname(path), glob_pattern=os.path.basename(path), compression="gzip")
extractor = Trafilatura(favour_precision=False, timeout=60)
count = text = 0
for document in extractor.run(reader.run()):
    count, text = count + 1, text + len(document.text)
"""

FRAME = """
import os, resource, sys, json
path, way = sys.argv[1:]
{work}
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
seconds = sum(one.ru_utime + one.ru_stime for one in used)
print(json.dumps({{"seconds": seconds, "pages": count, "characters": text, "peak_mb": used[0].ru_maxrss / 1024}}))
"""

EMPTY = "count = text = 0\n"
"""Work of an empty process; its time is subtracted."""


def pack(pages: list[Path], path: Path) -> int:
    """Write the pages as a crawl archive and return the bytes of HTML."""
    total = 0
    with open(path, "wb") as archive:
        for number, page in enumerate(pages):
            html = page.read_bytes()
            total += len(html)
            block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html
            for kind, content in (("request", b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"), ("response", block)):
                header = (
                    f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number:032x}>\r\n"
                    f"WARC-Date: 2024-01-01T00:00:00Z\r\nWARC-Target-URI: http://a.example/{number}\r\n"
                    f"Content-Type: application/http; msgtype={kind}\r\nContent-Length: {len(content)}\r\n\r\n"
                )
                archive.write(gzip.compress(header.encode() + content + b"\r\n\r\n", mtime=0))
    return total


def measure(python: str, work: str, path: Path, way: str) -> dict[str, float] | None:
    """Run once in a separate process; return None if the peer is missing or fails."""
    code = FRAME.format(work=work)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, str(path), way], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        print(f"  skipped: {(done.stderr.strip().splitlines() or ['failed'])[-1]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--html", type=Path, required=True, help="folder of .html files")
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--peer-pages", type=int, default=40)
    parser.add_argument("--peer-python", help="Python with warcio, trafilatura and datatrove")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pages = sorted(arguments.html.rglob("*.html"))[: arguments.pages]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "all.warc.gz", Path(folder) / "some.warc.gz"
        sizes = {large: pack(pages, large)}
        step = max(len(pages) // arguments.peer_pages, 1)
        sizes[small] = pack(pages[::step][: arguments.peer_pages], small)
        me, peer = sys.executable, arguments.peer_python
        ways = [("bessemer", me, OURS, "archive", large), ("bessemer", me, OURS, "all text", large)]
        ways += [
            ("bessemer", me, OURS, "main content", large),
            ("bessemer, same pages", me, OURS, "main content", small),
        ]
        if peer:
            ways += [
                ("warcio", peer, WARCIO, "archive", large),
                ("warcio + trafilatura", peer, WARCIO, "main content", small),
            ]
            ways += [("datatrove", peer, DATATROVE, "main content", small)]
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(arguments.rounds):
            for name, python, work, way, path in ways:
                start_up = measure(python, EMPTY, path, way)
                found = measure(python, work, path, way)
                if found and start_up:
                    found["rate"] = sizes[path] / 1e6 / (found["seconds"] - start_up["seconds"])
                    runs.setdefault((name, way), []).append(found)
        print(f"{len(pages)} pages, {sizes[large] / 1e6:.1f} MB of HTML; MB of HTML per CPU-second")
        for (name, way), found_runs in runs.items():
            rate = median(run["rate"] for run in found_runs)
            last = found_runs[-1]
            print(f"{name:24s} {way:14s} {rate:8.2f}  {last['pages']:5.0f} pages {last['characters']:10.0f} characters "
                  f"{last['peak_mb']:6.0f} MB peak")  # fmt: skip
            results.append({"name": name, "way": way, "mb_per_cpu_second": rate, **last})
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
