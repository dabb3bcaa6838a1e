"""Encoding: MB of text per second of processor time and of wall time, against HF tokenizers and others, ids compared.

Trains one byte-level BPE (GPT-4's pattern) on the text, then encodes all of it by every side, in turns, with one thread and
with two, each number of threads in a process of its own. Sides: `tokenizers` one text at a time (as most scripts call it) and in
batches; tiktoken alone; rustbpe where it is installed; Bessemer. Every side's ids of every document are compared with those of
`tokenizers` (not rustbpe's, which has a vocabulary of its own). --gpt2: GPT-2's pattern, with gigatoken too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

END = "<|endoftext|>"
Encoded = list[Any]


def texts_of(folders: list[Path], megabytes: float) -> list[str]:
    """Whole files, evenly over all that there are, until there is enough."""
    files = sorted(
        file for folder in folders for ending in ("*.py", "METADATA", "*.txt") for file in folder.rglob(ending)
    )
    found, held = [], 0
    for file in files[:: max(len(files) // 20_000, 1)]:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            found.append(text)
            held += len(text.encode())
        if held >= megabytes * 1e6:
            break
    return found


def threaded(encode: Callable[[list[str]], Encoded], texts: list[str], threads: int) -> Encoded:
    batches = [texts[start : start + 64] for start in range(0, len(texts), 64)]
    with ThreadPoolExecutor(threads) as pool:
        return [ids for batch in pool.map(encode, batches) for ids in batch]


def sides(path: Path, texts: list[str], threads: int, gpt2: bool) -> dict[str, Callable[[], Encoded]]:
    import tiktoken
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    from bessemer.tokens.tokenizer import Tokenizer

    inner = HuggingFaceTokenizer.from_file(str(path))
    inner.encode_special_tokens = True
    ours = Tokenizer.load(path, END)
    plain = ours._tiktoken
    assert isinstance(plain, tiktoken.Encoding)
    found: dict[str, Callable[[], Encoded]] = {
        "tokenizers, batches": lambda: [one.ids for one in inner.encode_batch_fast(texts, add_special_tokens=False)],
        "tiktoken alone": lambda: plain.encode_ordinary_batch(texts, num_threads=threads),
        "Bessemer": lambda: [ids[:-1] for ids in threaded(ours.encode_batch, texts, threads)],
    }
    if threads == 1:
        found["tokenizers, one by one"] = lambda: [inner.encode(text, add_special_tokens=False).ids for text in texts]
        try:
            import rustbpe

            from bessemer.tokens.patterns import GPT2, GPT4

            other = rustbpe.Tokenizer()
            started = process_time()
            other.train_from_iterator(texts, ours.vocabulary - 1, pattern=GPT2 if gpt2 else GPT4)
            print(f"rustbpe: trained {process_time() - started:.1f} s of processor time")
            found["rustbpe"] = lambda: [other.encode(text) for text in texts]
        except ImportError:
            print("rustbpe is not installed: left out")
    if gpt2:
        try:
            import gigatoken

            # It knows GPT-2's pattern only in the short form of a tokenizer.json.
            described = json.loads(path.read_text())
            described["pre_tokenizer"] = {
                "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
            }  # fmt: skip
            short = path.with_name("short.json")
            short.write_text(json.dumps(described))
            giga = gigatoken.Tokenizer(str(short))
            found["gigatoken"] = lambda: list(giga.encode_batch(texts))
        except Exception as error:  # a peer that does not work here is left out, with its reason
            print(f"gigatoken is left out: {type(error).__name__}: {error}")
    return found


def measure(path: Path, texts: list[str], threads: int, rounds: int, gpt2: bool) -> dict[str, Any]:
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    every = sides(path, texts, threads, gpt2)
    reference = [list(ids) for ids in every["tokenizers, batches"]()]
    rows: dict[str, Any] = {name: {"cpu": [], "wall": [], "differ": None} for name in every}
    for number in range(rounds):
        for name in [*every][number % len(every) :] + [*every][: number % len(every)]:
            wall, cpu = perf_counter(), process_time()
            ids = every[name]()
            rows[name]["cpu"].append(megabytes / (process_time() - cpu))
            rows[name]["wall"].append(megabytes / (perf_counter() - wall))
            if rows[name]["differ"] is None and name != "rustbpe":  # has a vocabulary of its own
                rows[name]["differ"] = sum(
                    [int(token) for token in left] != right for left, right in zip(ids, reference, strict=True)
                )
    best = max(median(row["cpu"]) for name, row in rows.items() if name.startswith("tokenizers"))
    for name, row in rows.items():
        row["times_tokenizers_at_its_best"] = round(median(row["cpu"]) / best, 2)
        row["cpu"], row["wall"] = ([round(value, 2) for value in row[key]] for key in ("cpu", "wall"))
        differ = "its own vocabulary" if row["differ"] is None else f"{row['differ']} of {len(texts)} documents differ"
        print(
            f"{threads} thread{'s' if threads > 1 else ' '}  {name:<24} {median(row['cpu']):7.2f} MB per CPU-second  "
            f"{median(row['wall']):7.2f} MB/s  {row['times_tokenizers_at_its_best']:5.2f} x  {differ}"
        )
    return {
        "sides": rows,
        "documents": len(texts),
        "megabytes": megabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, nargs="*", help="folders of text; left out: this Python's own packages")
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpt2", action="store_true", help="GPT-2's pattern instead of GPT-4's")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    paths = sysconfig.get_paths()
    texts = texts_of(given.text or [Path(paths["purelib"]), Path(paths["stdlib"])], given.megabytes)
    if given.threads:
        found = measure(given.tokenizer, texts, given.threads, given.rounds, given.gpt2)
        given.json.write_text(json.dumps(found))
        return
    from machine import describe

    from bessemer.tokens.patterns import GPT2, GPT4
    from bessemer.tokens.tokenizer import Tokenizer

    size = sum(len(text.encode()) for text in texts) / 1e6
    result: dict[str, Any] = {"pattern": "gpt2" if given.gpt2 else "gpt4", "vocabulary": given.vocabulary}
    with TemporaryDirectory() as folder:
        started = process_time()
        trained = Tokenizer.train(texts, given.vocabulary, END, regex=GPT2 if given.gpt2 else GPT4)
        result["training_mb_per_cpu_second"] = round(size / (process_time() - started), 2)
        (Path(folder) / "tokenizer.json").write_text(trained.to_json())
        for threads in (1, 2):
            out = Path(folder) / "out.json"
            again = [option for option in sys.argv[1:] if option not in ("--json", str(given.json))]
            more = ["--threads", str(threads), "--tokenizer", str(Path(folder) / "tokenizer.json"), "--json", str(out)]
            environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
            subprocess.run([sys.executable, __file__, *again, *more], env=environment, check=True)
            result[f"threads_{threads}"] = json.loads(out.read_text())
    print(f"training, tokenizers: {result['training_mb_per_cpu_second']} MB per CPU-second")
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
