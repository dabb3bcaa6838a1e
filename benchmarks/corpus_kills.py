"""A corpus on a Ray cluster whose driver or workers are killed at random, compared with one undisturbed process.

The crawl is a WARC file of pages made from Python's library, with near copies and repeated lines planted. The recipe extracts
text, identifies languages, applies rules, and removes low quality, near duplicates and repeated lines. A killed driver is started
again. Prints what was killed after which task, and whether the corpora are equal, file by file.

    python benchmarks/corpus_kills.py [--kills 10] [--megabytes 6] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import html
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import describe

from bessemer.corpus import partition, pipeline
from bessemer.corpus.dedup import task
from bessemer.corpus.readers import parts
from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory

RECIPE = """
[run]
name = "kills"
[model]
depth = 2
[corpus]
{engine}
[[corpus.sources]]
name = "crawl"
format = "warc"
paths = ["{folder}/crawl"]
[corpus.dedup]
lines = true
[corpus.quality]
high = ["{folder}/good"]
low = ["crawl"]
sources = ["crawl"]
hash_bits = 14
use = "filter"
keep_share = 0.8
"""
PAGE = "<html><head><title>{title}</title></head><body><main>{body}</main></body></html>"


def texts(megabytes: float) -> list[str]:
    """Return about `megabytes` MB of prose and code from Python's library."""
    found, size = [], 0.0
    for path in sorted(Path(json.__file__).parent.parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if 2000 < len(text) < 60_000:
            found.append(text)
            size += len(text) / 1e6
        if size > megabytes:
            break
    return found


def make_crawl(folder: Path, megabytes: float, draw: random.Random) -> None:
    """Write the crawl as one WARC file, and a folder of good texts for the quality classifier."""
    (folder / "crawl").mkdir()
    (folder / "good").mkdir()
    there = texts(megabytes)
    for number, text in enumerate(there[:80]):
        (folder / "good" / f"{number}.txt").write_text(text)
    pages = list(there)
    for text in draw.sample(there, len(there) // 5):
        words = text.split(" ")
        words[draw.randrange(len(words))] = "changed"
        pages += [" ".join(words), f"{draw.choice(there)[:3000]}\n{text[: len(text) // 2]}"]
    draw.shuffle(pages)
    with gzip.open(folder / "crawl" / "part-0.warc.gz", "wb", 1) as file:
        for number, text in enumerate(pages):
            lines = "".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n\n"))
            body = PAGE.format(title=number, body=lines).encode()
            block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + body
            head = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Date: 2026-05-06T07:08:09Z\r\n"
                f"WARC-Target-URI: http://a.example/{number}\r\nContent-Type: application/http; msgtype=response\r\n"
                f"Content-Length: {len(block)}\r\n\r\n"
            )
            file.write(head.encode() + block + b"\r\n\r\n")


def build(recipe: Path, run: Path) -> None:
    """Build the corpus with small parts, partitions and buckets, so that there are many tasks to kill."""
    parts.LEAST_PART_BYTES, partition.PARTITION_BYTES, partition.BUCKET_BYTES = 1 << 18, (1 << 18, 1 << 18), 1 << 19
    task.MEBIBYTE = 1 << 10  # several key ranges
    pipeline.build(parse(recipe.read_text(), "kills"), RunDirectory(run))


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file of the corpus, with the `seconds` of quality.json left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "stage.json":
            content = path.read_bytes()
            if path.name == "quality.json":
                content = json.dumps({**json.loads(content), "seconds": None}).encode()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def look(run: Path, seen: dict[str, None]) -> None:
    """Record the receipts of newly finished tasks in the work folder, in the order of their times."""
    with contextlib.suppress(FileNotFoundError):  # a folder was renamed meanwhile
        for path in sorted(run.glob("corpus.work/*/**/stage.json"), key=lambda path: path.stat().st_mtime):
            seen.setdefault(str(path.parent.relative_to(run / "corpus.work")))


def kill_worker(draw: random.Random) -> bool:
    """Kill a random Ray worker that is running a corpus task; return False if there is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().startswith(b"ray::answer"):
                found.append(int(entry.name))
    if found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(found), signal.SIGKILL)
    return bool(found)


def start(recipe: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start a driver in a separate process."""
    return subprocess.Popen([sys.executable, __file__, "--build", str(recipe), str(run)], start_new_session=True)


def torment(recipe: Path, run: Path, kills: int, num_tasks: int, draw: random.Random) -> list[dict[str, str]]:
    """Build until the corpus is finished while `kills` random kills happen, spread over the tasks.

    Returns:
        For each kill, what was killed and the last task that had ended before it.
    """
    moments = sorted(draw.sample(range(num_tasks * 9 // 10), kills))
    done: list[dict[str, str]] = []
    seen: dict[str, None] = {}
    while True:
        driver = start(recipe, run)
        while driver.poll() is None:
            time.sleep(0.05)
            look(run, seen)
            if len(done) < kills and len(seen) >= moments[len(done)]:
                time.sleep(draw.uniform(0, 0.5))
                what = draw.choice(["driver", "worker"])
                if what == "driver":
                    driver.kill()
                if what == "driver" or kill_worker(draw):
                    done.append({"killed": what, "after": next(reversed(seen), "nothing").partition("/")[2]})
                    print(done[-1], file=sys.stderr, flush=True)
        if driver.returncode == 0:
            return done
        if driver.returncode != -signal.SIGKILL:
            raise SystemExit(f"the driver ended with exit code {driver.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build:
        build(*given.build)
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as folder_name:
        folder, draw = Path(folder_name), random.Random(given.seed)
        make_crawl(folder, given.megabytes, draw)
        quiet, tormented = folder / "quiet", folder / "tormented"
        (folder / "quiet.toml").write_text(RECIPE.format(folder=folder, engine="workers = 1"))
        started = time.monotonic()
        driver, seen = start(folder / "quiet.toml", quiet), dict[str, None]()
        while driver.poll() is None:
            time.sleep(0.05)
            look(quiet, seen)
        if driver.returncode:
            raise SystemExit("the undisturbed build failed")
        seconds = {"quiet": round(time.monotonic() - started, 1)}
        cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        try:
            engine = f'engine = "ray"\naddress = "{cluster.address}"'
            (folder / "ray.toml").write_text(RECIPE.format(folder=folder, engine=engine))
            started = time.monotonic()
            kills = torment(folder / "ray.toml", tormented, given.kills, len(seen), draw)
            seconds["with kills"] = round(time.monotonic() - started, 1)
        finally:
            cluster.shutdown()
        mine, theirs = hashes(quiet / "corpus"), hashes(tormented / "corpus")
        statistics = json.loads((quiet / "corpus" / "statistics.json").read_text())
    facts = {
        "machine": describe(), "seconds": seconds, "tasks": len(seen),
        "kills": kills, "killed": dict(Counter(one["killed"] for one in kills)),
        "files": len(mine), "equal": mine == theirs,
        "different": sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name)),
        "totals": {key: statistics["totals"][key] for key in ("documents_in", "documents_kept", "rejected")},
        "lines": statistics["lines"],
    }  # fmt: skip
    text = json.dumps(facts, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    if not facts["equal"] or len(kills) < given.kills:
        raise SystemExit(
            "the corpora differ" if not facts["equal"] else "the build finished before all kills: raise --megabytes"
        )


if __name__ == "__main__":
    main()
