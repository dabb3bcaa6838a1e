"""Near deduplication end to end beside datatrove's four stages: MB of text per CPU-second, recall, precision.

Real documents (Python code, package descriptions, texts below the folders given) in JSONL, with exact and near copies
planted: 10% each; near ones by replacing words, of a Jaccard drawn evenly from 0.55 to 0.98. Both sides read the JSONL
and write the JSONL of what stays. The truth is computed, not estimated: every pair of documents, planted or not, whose
shingles have a Jaccard of 0.8 or more is found by an exact join (prefix filter, Chaudhuri et al. 2006), once with our
words and once with datatrove's, and each side is judged by its own. Recall: the share of those pairs of which not both
stay. Precision: the share of removed documents that have a true partner.

    python benchmarks/dedup.py [FOLDER ...] --datatrove-python VENV/bin/python --json FILE

CPU seconds of the process, one thread, without imports and compilation (a small round goes before).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
from machine import describe

from bessemer.corpus.dedup import KEPT
from bessemer.corpus.dedup.judging import judge
from bessemer.corpus.dedup.paragraphs import paragraph_filter, remove_paragraphs
from bessemer.corpus.dedup.signatures import longest, shingle_set, signatures, utf8
from bessemer.corpus.dedup.substrings import remove_substrings
from bessemer.corpus.dedup.verdicts import identity_of
from bessemer.corpus.document import identity
from bessemer.corpus.extract import NotText, description, fold, normalise
from bessemer.recipe import Dedup, Paragraphs, Substrings

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".html", ".c", ".h", ".js", ".json"}
SETTINGS = {
    "14 x 8, estimated": Dedup(),
    "14 x 8, verified at 0.8": Dedup(verify=True, min_jaccard=0.8),
    "20 x 7, verified at 0.8": Dedup(bands=20, rows=7, verify=True, min_jaccard=0.8),
    "20 x 7, estimated at 0.8": Dedup(bands=20, rows=7, min_jaccard=0.8),
}
ALIKE = 0.8
TABLE_BYTES = 4 << 20


def documents(folders: Sequence[Path], num_bytes: int) -> list[str]:
    """Real texts, in an order that the hash of their path gives, until there are so many bytes."""
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


def planted(texts: list[str], seed: int) -> list[dict[str, str]]:
    """Records with 10% exact and 10% near copies among them."""
    draw = random.Random(seed)
    count = len(texts) // 8
    chosen = draw.sample(texts, 2 * count)
    copies = chosen[:count]
    for text in chosen[count:]:
        wanted = draw.uniform(0.55, 0.98)
        words = text.split(" ")
        # A word changes 5 shingles: with c changes among n words the Jaccard is about (n - 5 c) / (n + 5 c).
        changes = max(round(len(words) * (1 - wanted) / (1 + wanted) / 5), 1)
        for place in draw.sample(range(len(words)), min(changes, len(words))):
            words[place] = f"w{draw.getrandbits(40):x}"
        copies.append(" ".join(words))
    every = texts + copies
    draw.shuffle(every)
    return [{"id": identity("benchmark", str(number), ""), "text": text} for number, text in enumerate(every)]


def alike_pairs(sets: list[np.ndarray], least: float) -> dict[tuple[int, int], float]:
    """All pairs of sets with a Jaccard of `least` or more, exactly: such a pair shares one of the rarest elements."""
    values, counts = np.unique(np.concatenate(sets), return_counts=True)
    by_prefix: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], float] = {}
    for number, mine in enumerate(sets):
        if not len(mine):
            continue
        rare = mine[np.lexsort((mine, counts[np.searchsorted(values, mine)]))]
        candidates: set[int] = set()
        for element in rare[: len(mine) - ceil(least * len(mine)) + 1].tolist():
            others = by_prefix.setdefault(element, [])
            candidates.update(others)
            others.append(number)
        for other in candidates:
            theirs = sets[other]
            if least * len(mine) <= len(theirs) <= len(mine) / least:
                shared = len(np.intersect1d(mine, theirs, assume_unique=True))
                share = shared / (len(mine) + len(theirs) - shared)
                if share >= least:
                    pairs[other, number] = share
    return pairs


def judged(names: list[str], pairs: dict[tuple[int, int], float], kept: set[str]) -> dict[str, float]:
    """Recall over pairs, and over the least alike of them, and precision over removed documents."""
    stays = [name in kept for name in names]
    partnered = {number for pair in pairs for number in pair}
    removed = [number for number, stay in enumerate(stays) if not stay]
    found = {pair: not (stays[pair[0]] and stays[pair[1]]) for pair in pairs}
    hard = [found[pair] for pair, share in pairs.items() if share < ALIKE + 0.05]
    return {
        "pairs": len(pairs),
        "removed": len(removed),
        "recall": sum(found.values()) / max(len(pairs), 1),
        "pairs_below_0.85": len(hard),
        "recall_below_0.85": sum(hard) / max(len(hard), 1),
        "precision": sum(number in partnered for number in removed) / max(len(removed), 1),
    }


def jsonl_tables(path: Path) -> Callable[[Sequence[str]], Iterator[pa.Table]]:
    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        names: list[str] = []
        texts: list[str] = []
        size = 0
        with path.open(encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                names.append(record["id"])
                texts.append(record["text"])
                size += len(line)
                if size > TABLE_BYTES:
                    yield pa.table({"identity": names, "text": pa.array(texts, pa.large_string())})
                    names, texts, size = [], [], 0
        if names:
            yield pa.table({"identity": names, "text": pa.array(texts, pa.large_string())})

    return read


def ours(source: Path, target: Path, settings: Dedup) -> float:
    """CPU seconds from the JSONL to the JSONL of what stays."""
    started = process_time()
    verdicts = judge(jsonl_tables(source), settings, target.parent / "scratch")
    kept = {identity_of(name) for name in verdicts.identities[verdicts.verdict == KEPT]}
    with source.open(encoding="utf-8") as file, target.open("w", encoding="utf-8") as out:
        out.writelines(line for line in file if line[8:40] in kept)
    return process_time() - started


def edits(source: Path, folder: Path) -> dict[str, dict[str, float]]:
    """CPU seconds and characters removed of what cuts parts out, reading included."""
    num_words = sum(len(text.split()) for table in jsonl_tables(source)(["text"]) for text in table["text"].to_pylist())
    rows: dict[str, dict[str, float]] = {}
    for mode in ("paragraph", "ngram"):
        settings = Paragraphs(mode=mode)
        started = process_time()
        done = list(remove_paragraphs(jsonl_tables(source)(["text"]), paragraph_filter(num_words, settings), settings))
        rows[f"paragraphs, {mode}"] = {
            "cpu_seconds": process_time() - started,
            "removed_characters": sum(edit.removed_characters for _, found in done for edit in found),
        }
    for unit, least in (("words", 50), ("bytes", 200)):
        started = process_time()
        spans = remove_substrings(jsonl_tables(source), Substrings(unit=unit, min_tokens=least), folder / "spans")
        removed = sum(edit.removed_characters for _, found in spans for edit in found)
        rows[f"substrings of {least} {unit}"] = {"cpu_seconds": process_time() - started, "removed_characters": removed}
    return rows


def kernels(texts: list[str]) -> dict[str, float]:
    """MB per CPU-second of signatures alone, of folded texts: our kernel, and Daft's expression where Daft is installed."""
    folded = [fold(text) for text in texts]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rates = {}
    started = process_time()
    signatures(folded, Dedup())
    rates["bessemer"] = megabytes / (process_time() - started)
    try:
        import daft
    except ImportError:
        return rates
    column = daft.col("text").minhash(num_hashes=112, ngram_size=5, hash_function="xxhash3_64")
    frame = daft.from_pydict({"text": folded})
    started = process_time()
    frame.select(column).to_arrow()
    rates["daft"] = megabytes / (process_time() - started)
    return rates


def scale(num_documents: int, folder: Path) -> dict[str, float]:
    """Peak memory and CPU seconds for so many random signatures, 10% of them planted near copies of another."""
    settings, size = Dedup(), 100_000
    num_hashes = settings.bands * settings.rows

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        for start in range(0, num_documents, size):
            rng = np.random.default_rng(start)
            count = min(size, num_documents - start)
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

    before = peak_mib()
    started = process_time()
    found = judge(read, settings, folder / "scale")
    return {
        "documents": num_documents,
        "near_duplicates": int((found.verdict != KEPT).sum()),
        "cpu_seconds": process_time() - started,
        "peak_mib_before": before,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Largest resident set of this process so far (Linux); getrusage would count that of the process it came from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="default: the standard library and site-packages")
    parser.add_argument("--megabytes", type=float, default=20.0, help="of text before copies are planted")
    parser.add_argument("--datatrove-python", type=Path, help="a Python with datatrove[processing,io] and spacy")
    parser.add_argument("--scale", type=int, default=1_000_000, help="documents of the memory test; 0: without it")
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
    """Both sides over the same file."""
    folders = given.folders or [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib")]
    texts = documents(folders, int(given.megabytes * 1e6))
    records = planted(texts, 0)
    (folder / "input").mkdir()
    source = folder / "input" / "documents.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    names = [record["id"] for record in records]
    megabytes = sum(len(record["text"].encode()) for record in records) / 1e6
    print(f"{len(texts)} documents, {len(records)} with copies, {megabytes:.1f} MB of text")

    small = folder / "small.jsonl"
    small.write_text("".join(json.dumps(record) + "\n" for record in records[:50]), encoding="utf-8")
    for settings in SETTINGS.values():
        ours(small, folder / "kept.jsonl", settings)
    edits(small, folder)

    data, offsets = utf8([fold(record["text"]) for record in records])
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    sets = [shingle_set(data[offsets[i] : offsets[i + 1]], Dedup(), buffer) for i in range(len(records))]
    truth = alike_pairs(sets, ALIKE)
    rows: list[dict[str, Any]] = []
    for name, settings in SETTINGS.items():
        seconds = ours(source, folder / "kept.jsonl", settings)
        kept = {line[8:40] for line in (folder / "kept.jsonl").open(encoding="utf-8")}
        rows.append({"side": f"bessemer, {name}", "cpu_seconds": seconds, **judged(names, truth, kept)})
    if given.datatrove_python:
        rows.append(datatrove(given.datatrove_python, folder, names))
    for row in rows:
        row["mb_per_cpu_second"] = megabytes / row["cpu_seconds"]
        print(
            f"  {row['side']:<34} {row['mb_per_cpu_second']:8.2f} MB/CPU-s  recall {row['recall']:.4f} of {row['pairs']} "
            f"pairs, {row['recall_below_0.85']:.4f} of {row['pairs_below_0.85']} below 0.85  precision "
            f"{row['precision']:.4f} of {row['removed']} removed"
        )
    cut = edits(source, folder)
    for name, counts in cut.items():
        counts["mb_per_cpu_second"] = megabytes / counts["cpu_seconds"]
        print(
            f"  {name:<34} {counts['mb_per_cpu_second']:8.2f} MB/CPU-s  {counts['removed_characters']:.0f} characters removed"
        )
    alone = kernels([record["text"] for record in records])
    print(f"  signatures alone: {alone}")
    return {"documents": len(records), "megabytes": megabytes, "rows": rows, "edits": cut, "signatures": alone}


def datatrove(python: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    """Its four stages at the same bands, rows and shingles, judged by its own words."""
    job = {
        "input": str(folder / "input"), "work": str(folder / "peer"), "answer": str(folder / "answer.json"),
        "shingles": str(folder / "shingles.npz"), "bands": 14, "rows": 8, "shingle_words": 5,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).parent / "dedup_peer.py"
    subprocess.run([python, script, folder / "job.json"], check=True, capture_output=True)
    answer = json.loads((folder / "answer.json").read_text())
    shingles = np.load(folder / "shingles.npz")
    truth = alike_pairs([shingles[name] for name in names], ALIKE)
    return {
        "side": f"datatrove {answer['version']}, 14 x 8",
        "cpu_seconds": sum(answer["cpu_seconds"].values()),
        "stages": answer["cpu_seconds"],
        **judged(names, truth, set(answer["kept"])),
    }


if __name__ == "__main__":
    main()
