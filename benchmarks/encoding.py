"""Encoding speed compared with `tokenizers` and tiktoken, in MB of text per CPU-second, with the ids compared.

Trains one byte-level BPE (the pattern of GPT-4) on a part of the text, then encodes the text in chunks of about 8 MB. The sides
take turns in one process and thread. The encoders cache pieces they have seen, so the rate is measured after the first 32 MB. The
sides are `tokenizers` in batches, tiktoken where it is installed, and Bessemer, which encodes with gigatoken. The ids of every
document are compared with those of `tokenizers`.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"
END = "<|endoftext|>"
CHUNK_MB, WARM_MB = 8.0, 32.0
Encode = Callable[[list[str]], Sequence[Any]]


def texts_of(folders: list[Path], megabytes: float) -> list[str]:
    """Return `megabytes` MB of whole files, spread evenly over the folders and without repeated contents."""
    files = sorted(
        file for folder in folders for ending in ("*.py", "METADATA", "*.txt") for file in folder.rglob(ending)
    )
    found, held = dict[str, None](), 0
    for file in files[:: max(len(files) // 20_000, 1)]:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text not in found:
            found[text] = None
            held += len(text.encode())
        if held >= megabytes * 1e6:
            break
    return list(found)


def chunks(texts: list[str]) -> Iterator[tuple[list[str], float]]:
    """Yield texts of about `CHUNK_MB` in total, and their size in MB."""
    chunk, size = [], 0.0
    for text in texts:
        chunk.append(text)
        size += len(text.encode()) / 1e6
        if size >= CHUNK_MB:
            yield chunk, size
            chunk, size = [], 0.0


def tiktoken_of(path: Path, regex: str) -> Encode | None:
    """Return an encoder that runs tiktoken with the vocabulary of a tokenizer.json; None if it is not installed."""
    try:
        import tiktoken
    except ImportError:
        return None
    from bessemer.tokens.tokenizer.description import byte_alphabet

    byte_of, vocabulary = byte_alphabet(), json.loads(path.read_text())["model"]["vocab"]
    ranks = {bytes(byte_of[sign] for sign in token): number for token, number in vocabulary.items() if token != END}
    encoding = tiktoken.Encoding("peer", pat_str=regex, mergeable_ranks=ranks, special_tokens={END: vocabulary[END]})
    return lambda texts: [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, nargs="*", help="folders of text (default: the packages of this Python)")
    parser.add_argument("--megabytes", type=float, default=96.0)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from machine import describe
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    from bessemer.tokens.tokenizer import Tokenizer
    from bessemer.tokens.tokenizer.patterns import GPT4

    paths = sysconfig.get_paths()
    texts = texts_of(options.text or [Path(paths["purelib"]), Path(paths["stdlib"])], options.megabytes)
    started, sample = process_time(), texts[::6]
    trained = Tokenizer.train(sample, options.vocabulary, END)
    training = sum(len(text.encode()) for text in sample) / 1e6 / (process_time() - started)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"encoding-{os.getpid()}.json"
    path.write_text(trained.to_json())
    library, ours, peer = (
        HuggingFaceTokenizer.from_file(str(path)),
        trained.accelerate(sample[:64]),
        tiktoken_of(path, GPT4),
    )
    path.unlink()
    assert ours.encoder_name == "gigatoken"
    library.encode_special_tokens = True
    sides: dict[str, Encode] = {
        "tokenizers, batches": lambda some: [
            one.ids for one in library.encode_batch_fast(some, add_special_tokens=False)
        ],
        "Bessemer": lambda some: [ids[:-1] for ids in ours.encode_batch(some)],
    }
    if peer is not None:
        sides["tiktoken"] = peer
    rows: dict[str, Any] = {name: {"cold": [0.0, 0.0], "warm": [0.0, 0.0], "differ": 0} for name in sides}
    total, documents = 0.0, 0
    for number, (chunk, size) in enumerate(chunks(texts)):
        ids = {}
        for place in range(len(sides)):
            name = list(sides)[(place + number) % len(sides)]
            started = process_time()
            ids[name] = sides[name](chunk)
            part = rows[name]["cold" if total < WARM_MB else "warm"]
            part[0] += size
            part[1] += process_time() - started
        for name, theirs in ids.items():
            wanted = ids["tokenizers, batches"]
            rows[name]["differ"] += sum(list(one) != list(other) for one, other in zip(theirs, wanted, strict=True))
        total, documents = total + size, documents + len(chunk)
    for row in rows.values():
        for part in ("cold", "warm"):
            row[f"{part}_mb_per_cpu_second"] = round(row[part][0] / row.pop(part)[1], 2)
    library_rate = rows["tokenizers, batches"]["warm_mb_per_cpu_second"]
    for name, row in rows.items():
        row["times_tokenizers"] = round(row["warm_mb_per_cpu_second"] / library_rate, 2)
        print(
            f"{name:<20} {row['warm_mb_per_cpu_second']:7.1f} MB per CPU-second after {WARM_MB:.0f} MB, "
            f"{row['cold_mb_per_cpu_second']:7.1f} before; {row['differ']} of {documents} documents differ"
        )
    if options.json:
        result = {
            "machine": describe(), "vocabulary": options.vocabulary, "documents": documents, "megabytes": round(total, 1),
            "training_mb_per_cpu_second": round(training, 2), "sides": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
