"""Near deduplication compared with datatrove's four stages: MB of text per CPU-second, recall, precision.

The input is real documents (Python code, package descriptions, texts in the given folders) as JSONL, with 10% exact and 10% near
copies planted. Near copies have words replaced, with a Jaccard similarity drawn uniformly from 0.55 to 0.98. Both sides read the
JSONL and write the JSONL of the kept documents. The truth is computed, not estimated: the Jaccard of the shingles of each planted
pair, and an exact join of all pairs with 0.7 or more, once for our split into words and once for datatrove's. Each side is judged
by its own split.

Recall (planted): among planted near copies with a true Jaccard of 0.8 or more, the share in which the copy or its original was
removed. Exact copies are reported separately. Recall (all) covers every pair with 0.8 or more, planted or not, exact or near.
Precision: among documents removed as near duplicates, the share that has a true Jaccard of 0.8 or more with another document that
was kept or removed for the same one. Documents with equal text (case and white space folded) count once and are no partners of
each other, so that exact copies neither raise nor lower it. Two more shares are reported: with a partner of 0.7 or more, and with
the kept document as partner (connected components are chains: A resembles B, B resembles C).

    python benchmarks/dedup.py [FOLDER ...] --datatrove-python VENV/bin/python --json FILE

Reports CPU seconds of the process on one thread, without imports and compilation (a small round runs first): the median of three
rounds for Bessemer, one round for the peer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from dedup_truth import ALIKE, LEAST, Outcome, Pair, alike_pairs, jaccard, precision, recall
from machine import describe

from bessemer.common.errors import NotText
from bessemer.corpus.dedup.lines import LineStep
from bessemer.corpus.dedup.search import DuplicateStep
from bessemer.corpus.dedup.signatures import longest, shingle_set, signatures, utf8
from bessemer.corpus.document import identity
from bessemer.corpus.global_steps import CorpusDocuments, DocumentPart, run_step
from bessemer.corpus.readers.formats.descriptions import description
from bessemer.corpus.verdicts import read_table
from bessemer.recipe import Dedup
from bessemer.text.normalise import fold, normalise

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".html", ".c", ".h", ".js", ".json"}
SETTINGS = {
    "20 x 7, verified at 0.8 (default)": Dedup(),
    "14 x 8, verified at 0.8": Dedup(bands=14, rows=8),
    "20 x 7, estimated at 0.8": Dedup(verify=False),
    "14 x 8, estimated at 0.7": Dedup(bands=14, rows=8, verify=False, min_jaccard=0.7),
}
PEER_SETTINGS = ((14, 8), (20, 7))
"""(bands, rows) of datatrove: its default, and Bessemer's."""

ROUNDS = 3
TABLE_BYTES = 4 << 20


def documents(folders: Sequence[Path], num_bytes: int) -> list[str]:
    """Return at least `num_bytes` of real texts, in an order given by the hash of their paths."""
    found = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES or path.name == "METADATA"
    ]
    found.sort(key=lambda path: identity("benchmark", str(path), ""))
    texts, total = [], 0
    for path in found:
        try:
            text = normalise(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, NotText):
            continue
        text = normalise(description(text)) if path.name == "METADATA" else text
        if 500 <= len(text) <= 200_000 and len(text.split()) >= 60:
            texts.append(text)
            total += len(text.encode())
        if total >= num_bytes:
            break
    return texts


def planted(texts: list[str], seed: int) -> tuple[list[dict[str, str]], list[Pair], list[Pair]]:
    """Return records with 10% exact and 10% near copies, and the pairs of original and copy: exact, near."""
    draw = random.Random(seed)
    count = len(texts) // 8
    chosen = draw.sample(range(len(texts)), 2 * count)
    copies = [texts[number] for number in chosen[:count]]
    for number in chosen[count:]:
        wanted = draw.uniform(0.55, 0.98)
        words = texts[number].split(" ")
        # A changed word changes 5 shingles: with c changes in n words the Jaccard is about (n - 5 c) / (n + 5 c).
        changes = max(round(len(words) * (1 - wanted) / (1 + wanted) / 5), 1)
        for place in draw.sample(range(len(words)), min(changes, len(words))):
            words[place] = f"w{draw.getrandbits(40):x}"
        copies.append(" ".join(words))
    every = texts + copies
    order = list(range(len(every)))
    draw.shuffle(order)
    where_is = {number: where for where, number in enumerate(order)}
    pairs = [(where_is[number], where_is[len(texts) + copy]) for copy, number in enumerate(chosen)]
    records = [
        {"id": identity("benchmark", str(where), ""), "text": every[number]} for where, number in enumerate(order)
    ]
    return records, pairs[:count], pairs[count:]


@dataclass(frozen=True)
class JsonlPart(DocumentPart):
    """The documents of a JSONL file as a part of a corpus."""

    path: Path
    num_documents: int

    @property
    def size(self) -> int:
        return self.num_documents

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield tables of identities and texts."""
        names: list[str] = []
        texts: list[str] = []
        num_bytes = 0
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                names.append(record["id"])
                texts.append(record["text"])
                num_bytes += len(line)
                if num_bytes > TABLE_BYTES:
                    yield _table(names, texts)
                    names, texts, num_bytes = [], [], 0
        if names:
            yield _table(names, texts)


def _table(names: list[str], texts: list[str]) -> pa.Table:
    words = [text.count(" ") + 1 for text in texts]
    text = pa.array(texts, pa.large_string())
    return pa.table({"identity": names, "text": text, "words": words, "characters": [*map(len, texts)]})


class Found(NamedTuple):
    """Removed documents, each with the kept document it duplicates, and the counts by kind."""

    keepers: dict[str, str]
    removed: dict[str, int]


def ours(source: Path, names: list[str], target: Path, settings: Dedup) -> tuple[float, Found]:
    """Deduplicate JSONL with Bessemer and return the CPU seconds from JSONL to JSONL, and the decisions."""
    scratch = target.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    part = JsonlPart(source, len(names))
    sizes = [table.num_rows for table in part(["identity"])]
    started = process_time()
    found = run_step(DuplicateStep(**dict(settings)), CorpusDocuments([part], scratch, "benchmark"))
    keepers, first = dict[str, str](), 0
    for path, size in zip(sorted((scratch / "verdicts").rglob("*.arrow")), sizes, strict=True):
        gone = read_table(path).to_pylist()
        keepers |= {names[first + row["row"]]: row["detail"].split()[2] for row in gone}
        first += size
    with source.open(encoding="utf-8") as file, target.open("w", encoding="utf-8") as out:
        out.writelines(line for line in file if line[8:40] not in keepers)
    return process_time() - started, Found(keepers, found["statistics"]["removed"])


def our_outcome(found: Found, names: list[str], target: Path) -> Outcome:
    """Return the outcome per document; the kept documents are read from the written file."""
    with target.open(encoding="utf-8") as file:
        kept = {line[8:40] for line in file}
    numbers = {name: number for number, name in enumerate(names)}
    return Outcome([numbers[found.keepers.get(name, name)] for name in names], [name in kept for name in names])


def edits(source: Path, folder: Path) -> dict[str, float]:
    """Return the CPU seconds of removing repeated lines, reading included, and the characters removed."""
    started, part = process_time(), JsonlPart(source, 0)
    place = folder / f"lines-{source.stem}"
    removed = run_step(LineStep(lines=True), CorpusDocuments([part], place, ""))["statistics"]["removed_characters"]
    return {"cpu_seconds": process_time() - started, "removed_characters": removed}


def kernels(texts: list[str]) -> dict[str, float]:
    """Return MB per CPU-second of signatures of folded texts, for our kernel and for Daft's where it is installed."""
    folded = [fold(text) for text in texts]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates = {"bessemer": megabytes / median(_seconds(lambda: signatures(folded, Dedup())) for _ in range(ROUNDS))}
    try:
        import daft
    except ImportError:
        return rates
    column = daft.col("text").minhash(num_hashes=140, ngram_size=5, hash_function="xxhash3_64")
    frame = daft.from_pydict({"text": folded})
    rates["daft"] = megabytes / median(_seconds(lambda: frame.select(column).to_arrow()) for _ in range(ROUNDS))
    return rates


def _seconds(work: Callable[[], object]) -> float:
    started = process_time()
    work()
    return process_time() - started


@dataclass(frozen=True)
class RandomPart:
    """Documents with random signatures, of which 10% are near copies of another one."""

    first: int
    size: int
    corpus: str = ""

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield one table without texts."""
        num_hashes = Dedup().bands * Dedup().rows
        rng, count = np.random.default_rng(self.first), self.size
        signed = rng.integers(0, 1 << 32, (count, num_hashes), dtype=np.uint32)
        copies = count // 10
        same = rng.random((copies, num_hashes)) < 0.9
        signed[count - copies :] = np.where(same, signed[:copies], signed[count - copies :])
        names = rng.bytes(16 * count).hex()
        yield pa.table({
            "identity": [names[32 * i : 32 * i + 32] for i in range(count)],
            "exact": pa.array([rng.bytes(16) for _ in range(count)], pa.binary()),
            "characters": rng.integers(200, 20_000, count),
            "signature": pa.FixedSizeListArray.from_arrays(pa.array(signed.reshape(-1)), num_hashes),
        })  # fmt: skip


def scale(num_documents: int, folder: Path) -> dict[str, float]:
    """Return peak memory and CPU seconds for `num_documents` random signatures, with 10% planted near copies."""
    step, size = DuplicateStep(verify=False), 100_000  # without texts there is nothing to verify
    parts = [RandomPart(start, min(size, num_documents - start)) for start in range(0, num_documents, size)]
    before = peak_mib()
    started = process_time()
    found = run_step(step, CorpusDocuments(parts, folder / "scale", "benchmark"))
    return {
        "documents": num_documents,
        "near_duplicates": found["statistics"]["removed"]["near"],
        "cpu_seconds": process_time() - started,
        "peak_mib_before": before,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Return the largest resident set of this process so far (Linux). `getrusage` would include that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="default: the standard library and site-packages")
    parser.add_argument("--megabytes", type=float, default=20.0, help="MB of text before copies are planted")
    parser.add_argument("--datatrove-python", type=Path, help="Python with datatrove[processing,io] and spacy")
    parser.add_argument("--scale", type=int, default=1_000_000, help="documents of the memory test (0 skips it)")
    parser.add_argument("--scale-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.scale_only:
            print(json.dumps(scale(given.scale, folder)))
            return
        result = compare(given, folder)
    if given.scale:
        command = [sys.executable, __file__, "--scale-only", "--scale", str(given.scale)]
        result["scale"] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(result["scale"])
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both sides on the same file and return their results."""
    folders = given.folders or [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib")]
    texts = documents(folders, int(given.megabytes * 1e6))
    records, exact, near = planted(texts, 0)
    (folder / "input").mkdir()
    source = folder / "input" / "documents.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    names = [record["id"] for record in records]
    folded = [fold(record["text"]) for record in records]
    megabytes = sum(len(record["text"].encode()) for record in records) / 1e6
    print(f"{len(texts)} documents, {len(records)} with copies, {megabytes:.1f} MB of text")

    small, target = folder / "small.jsonl", folder / "kept.jsonl"
    small.write_text("".join(json.dumps(record) + "\n" for record in records[:50]), encoding="utf-8")
    for settings in SETTINGS.values():
        ours(small, names[:50], target, settings)
    edits(small, folder)

    data, offsets = utf8(folded)
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sets = [shingle_set(data[offsets[i] : offsets[i + 1]], Dedup(), buffer) for i in range(len(records))]
    alike = alike_pairs(sets, LEAST)
    rows: list[dict[str, Any]] = []
    for name, settings in SETTINGS.items():
        rounds = [ours(source, names, target, settings) for _ in range(ROUNDS)]
        found = rounds[-1][1]
        row = judged(our_outcome(found, names, target), folded, sets, alike, exact, near)
        assert (row["removed_near"], row["removed"]) == (found.removed["near"], sum(found.removed.values()))
        rows.append({"side": f"bessemer, {name}", "cpu_seconds": median(seconds for seconds, _ in rounds), **row})
    if given.datatrove_python:
        for bands, in_band in PEER_SETTINGS:
            rows.append(datatrove(given.datatrove_python, folder, names, folded, exact, near, bands, in_band))
    for row in rows:
        row["mb_per_cpu_second"] = megabytes / row["cpu_seconds"]
    peer = next((row for row in rows if row["side"].startswith("datatrove")), None)
    for row in rows:
        if peer is not None:
            row["times_the_peer"] = row["mb_per_cpu_second"] / peer["mb_per_cpu_second"]
        told = {key: f"{row[key]['recall']:.2%} of {row[key]['pairs']}" for key in ("near", "exact", "all")}
        print(
            f"  {row['side']:<44} {row['mb_per_cpu_second']:6.2f} MB/CPU-s ({row.get('times_the_peer', 1):.1f})  recall: "
            f"near {told['near']}, exact {told['exact']}, all pairs {told['all']}; precision {row['precision']:.2%} of "
            f"{row['removed_near']} (at 0.7 {row['precision_at_0.7']:.2%}, to the kept document {row['precision_to_kept']:.2%})"
        )
    cut = edits(source, folder)
    cut["mb_per_cpu_second"] = megabytes / cut["cpu_seconds"]
    print(
        f"  repeated lines: {cut['mb_per_cpu_second']:.2f} MB/CPU-s, {cut['removed_characters']:.0f} characters removed"
    )
    alone = kernels([record["text"] for record in records])
    print(f"  signatures alone: {alone}")
    note = "busy machine: CPU seconds; read the ratios"
    planted_counts = {"exact": len(exact), "near": len(near)}
    return {
        "note": note, "documents": len(records), "megabytes": megabytes, "planted": planted_counts, "rows": rows,
        "lines": cut, "signatures": alone,
    }  # fmt: skip


def judged(
    outcome: Outcome,
    folded: list[str],
    sets: list[np.ndarray],
    alike: dict[Pair, float],
    exact: list[Pair],
    near: list[Pair],
) -> dict[str, Any]:
    """Return the recall of planted near copies, planted exact copies and all pairs with `ALIKE` or more, and the precision."""
    true = {pair: share for pair in near if (share := jaccard(sets[pair[0]], sets[pair[1]])) >= ALIKE}
    return {
        "near": recall(outcome, true),
        "exact": recall(outcome, dict.fromkeys(exact, 1.0)),
        "all": recall(outcome, {pair: share for pair, share in alike.items() if share >= ALIKE}),
        **precision(outcome, folded, alike),
    }


def datatrove(
    python: Path,
    folder: Path,
    names: list[str],
    folded: list[str],
    exact: list[Pair],
    near: list[Pair],
    bands: int,
    in_band: int,
) -> dict[str, Any]:
    """Run datatrove's four stages with the same shingle size and judge them by datatrove's split into words."""
    work = folder / f"peer-{bands}"
    job = {
        "input": str(folder / "input"), "work": str(work), "answer": str(folder / "answer.json"),
        "shingles": str(folder / "shingles.npz"), "bands": bands, "rows": in_band, "shingle_words": 5,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).parent / "dedup_peer.py"
    subprocess.run([python, script, folder / "job.json"], check=True, capture_output=True)
    answer = json.loads((folder / "answer.json").read_text())
    shingles = np.load(folder / "shingles.npz")
    sets = [shingles[name] for name in names]
    kept = set(answer["kept"])
    # A document without a cluster is its own component.
    component = [answer["clusters"].get(name, -1 - number) for number, name in enumerate(names)]
    return {
        "side": f"datatrove {answer['version']}, {bands} x {in_band}",
        "cpu_seconds": sum(answer["cpu_seconds"].values()),
        "stages": answer["cpu_seconds"],
        **judged(
            Outcome(component, [name in kept for name in names]), folded, sets, alike_pairs(sets, LEAST), exact, near
        ),
    }


if __name__ == "__main__":
    main()
