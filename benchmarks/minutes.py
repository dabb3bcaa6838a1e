"""The best model for the minutes: Bessemer and other trainers on the same text, cores and minutes.

Each trainer runs in its recommended recipe for a CPU (minutes_worker.py), with a vocabulary of the same size. Trainers
alternate, seed by seed. The minutes are those of training, without preparing tokens, compiling or the final scores. All are
scored on the same held-out documents: each on its own, in windows of the length that the model was trained on, per byte of text.

    python benchmarks/minutes.py --text code=FOLDER --text german=FOLDER --minutes 5 --seeds 3 --json FILE \\
        --peer nanochat=PYTHON:CHECKOUT --peer nanogpt=PYTHON:CHECKOUT --peer litgpt=PYTHON --peer trainer=PYTHON

PPMd (orders 10 and 16) and a byte 5-gram are fitted on the same training text, as lines to beat. A second call with the same
file adds rows to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from machine import describe, wait_until_idle

HELD_OUT = 0.03  # share of the documents that no trainer sees
HELD_OUT_BYTES = 400_000  # the first of them, by hash, up to this size
MAX_BYTES = 20_000_000
MIN_BYTES = 400  # bytes of a document
PEERS = ("nanochat", "nanogpt", "litgpt", "trainer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FOLDER", help="documents to read")
    parser.add_argument("--minutes", type=float, default=5, help="of training, for each trainer and seed (5)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="size of every tokenizer (2048)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[:CHECKOUT]")
    parser.add_argument("--skip-own", action="store_true", help="run the peers alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="key of our recipe")
    parser.add_argument("--option", action="append", default=[], help="option of minutes_worker.py for all peers")
    parser.add_argument("--json", type=Path, help="file of results, to which rows are added")
    arguments = parser.parse_args()
    for peer in arguments.peer:
        if "=" not in peer or peer.split("=")[0] not in PEERS:
            parser.error(f"--peer {peer}: write NAME=PYTHON[:CHECKOUT] with a name of {', '.join(PEERS)}")
    for text in arguments.text:
        if "=" not in text or not Path(text.split("=", 1)[1]).is_dir():
            parser.error(f"--text {text}: write NAME=FOLDER with a folder that exists")
    own = {} if arguments.skip_own else {"bessemer": sys.executable}
    trainers = own | dict(peer.split("=", 1) for peer in arguments.peer)
    stored = json.loads(arguments.json.read_text())["rows"] if arguments.json and arguments.json.exists() else []
    rows: list[dict[str, Any]] = stored
    for named in arguments.text:
        name, folder = named.split("=", 1)
        with tempfile.TemporaryDirectory() as data:
            sizes = prepare(folder, Path(data))
            if min(sizes.values()) == 0:
                parser.error(f"--text {named}: no document of {MIN_BYTES} bytes was held out; it needs some hundred")
            facts = {"text": name, "minutes": arguments.minutes, "vocabulary": arguments.vocabulary}
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for number in range(len(trainers)):
                    trainer = list(trainers)[(seed + number) % len(trainers)]
                    machine = describe(idle=wait_until_idle(60))
                    scored = run(trainer, trainers[trainer], Path(data), arguments, seed)
                    scored["options"] = " ".join(arguments.set if trainer == "bessemer" else arguments.option)
                    rows.append(facts | {"trainer": trainer, "seed": seed} | scored | {"machine": machine})
                    save(arguments.json, rows)
            if not any(row["text"] == name and row["trainer"] == "compressors" for row in rows):
                rows.append({"text": name, "trainer": "compressors"} | sizes | compressors(Path(data)))
                save(arguments.json, rows)
    keys = [(row["text"], row["minutes"], row["trainer"]) for row in rows if "seed" in row]
    for key in sorted(set(keys)):
        scores = [r["bits_per_byte"] for r in rows if "seed" in r and key == (r["text"], r["minutes"], r["trainer"])]
        print(*key, f"{mean(scores):.3f} bits per byte, {len(scores)} seeds, {min(scores):.3f} to {max(scores):.3f}")


def save(file: Path | None, rows: list[dict[str, Any]]) -> None:
    print(json.dumps(rows[-1]), flush=True)
    if file is not None:
        file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def prepare(folder: str, data: Path) -> dict[str, Any]:
    """Write the training documents and the held-out ones as JSON lines, and return their sizes."""
    import bessemer as bs

    documents = dict[str, str]()
    for record in bs.read(folder):
        text: str = record["text"]
        if len(text.encode()) >= MIN_BYTES:
            documents.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    split: dict[str, list[str]] = {"train": [], "held_out": []}
    sizes = dict.fromkeys(split, 0)
    for key, text in sorted(documents.items()):
        part = "held_out" if int(key[-8:], 16) < HELD_OUT * 2**32 else "train"
        size = len(text.encode())
        if sizes[part] + size <= (HELD_OUT_BYTES if part == "held_out" else MAX_BYTES):
            split[part].append(text)
            sizes[part] += size
    for part, texts in split.items():
        (data / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {f"{part}_bytes": size for part, size in sizes.items()}


def run(trainer: str, how: str, data: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train and score with one trainer in a process of its own, and return its row."""
    python, _, checkout = how.partition(":")
    command = [python, str(Path(__file__).with_name("minutes_worker.py")), trainer, "--data", str(data)]
    command += ["--minutes", str(arguments.minutes), "--seed", str(seed), "--vocabulary", str(arguments.vocabulary)]
    command += ["--checkout", checkout] * bool(checkout)
    if trainer == "bessemer":
        command += [part for value in arguments.set for part in ("--set", value)]
    else:
        command += arguments.option
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    scored: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return scored


def compressors(data: Path) -> dict[str, Any]:
    """Return the bits per byte of PPMd and of a byte 5-gram on the held-out documents."""
    from pyppmd import Ppmd8Encoder

    from bessemer.evaluate.ngram import NgramModel

    training, held_out = (
        [json.loads(line)["text"].encode() for line in (data / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "held_out")
    )
    size, scores = sum(map(len, held_out)), {}
    for order in (10, 16):
        encoder = Ppmd8Encoder(order, 2 << 30)
        for text in training:
            encoder.encode(text)
        packed = sum(len(encoder.encode(text)) for text in held_out) + len(encoder.flush())
        scores[f"ppmd_{order}"] = round(8 * packed / size, 4)
    scores["ngram"] = round(NgramModel(training).nats(held_out) / math.log(2) / size, 4)
    return scores


if __name__ == "__main__":
    main()
