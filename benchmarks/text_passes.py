"""MB of text per CPU-second of language identification, personal data and contamination, compared with peers.

The documents are those of a JSONL file with a field `text` or, without one, the Python code and package descriptions on this
machine. With a Python that has the peers (datatrove, xxhash below 4, py3langid, spacy), py3langid's and datatrove's passes run on
every n-th document, about --peer-bytes in total, and the ratios are taken on those. CPU time, which other processes disturb less
than wall time; the best of --rounds for each side, in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

from machine import describe

from bessemer.corpus.filters import contamination, language, personal
from bessemer.recipe import Contamination, EvaluationSet, Language, PersonalData

PAIRS = (
    ("language, first 2,000 characters", "py3langid, first 2,000 characters"),
    ("language, whole text", "py3langid, whole text"),
    ("personal data, e-mail and IP", "datatrove PII (e-mail and IP)"),
    ("contamination", "datatrove decontamination"),
)
"""Pairs of our pass and the peer's pass that does the same."""

KINDS = ("email", "ip", "card", "iban")


def documents(path: Path | None, num_bytes: int) -> list[str]:
    """Return up to `num_bytes` of texts of a JSONL file, or of this Python's code and packages."""
    texts, size = [], 0
    if path is None:
        paths = sysconfig.get_paths()
        files = sorted(Path(paths["stdlib"]).glob("*.py")) + sorted(Path(paths["purelib"]).glob("*.dist-info/METADATA"))
        source = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    else:
        source = (json.loads(line)["text"] for line in path.open(encoding="utf-8"))
    for text in source:
        texts.append(text)
        size += len(text.encode())
        if size >= num_bytes:
            break
    return texts


def planted(folder: Path) -> EvaluationSet:
    """Write a generated set of 1,000 items of 40 words, for machines without a real one; a pass costs the same."""
    path = folder / "made-up.txt"
    path.write_text(
        "\n".join(" ".join(f"w{(item * 40 + word) * 7919 % 99_991}" for word in range(40)) for item in range(1000))
    )
    return EvaluationSet(name="made-up", path=str(path))


def given_set(text: str) -> EvaluationSet:
    name, _, rest = text.partition("=")
    path, _, fields = rest.rpartition(":")
    return EvaluationSet(name=name, path=path, fields=tuple(fields.split(",")))


def passes(settings: Contamination) -> dict[str, Callable[[str], object]]:
    first = Language(identify=True)
    whole = Language(identify=True, characters=1 << 40)
    four, numbers = PersonalData(kinds=KINDS), PersonalData(kinds=(*KINDS, "us.ssn", "br.cpf"))
    index = contamination.build(settings)
    return {
        "language, first 2,000 characters": lambda text: language.identify(text, first),
        "language, whole text": lambda text: language.identify(text, whole),
        "personal data, e-mail and IP": lambda text: personal.replace(text, PersonalData(kinds=("email", "ip"))),
        "personal data, 4 kinds": lambda text: personal.replace(text, four),
        "personal data, 4 kinds and 2 of python-stdnum": lambda text: personal.replace(text, numbers),
        "contamination": lambda text: contamination.check(text, index),
    }


def rate(run: Callable[[str], object], texts: list[str], megabytes: float) -> float:
    started = process_time()
    for text in texts:
        run(text)
    return megabytes / (process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, help="JSONL file with a field `text`")
    parser.add_argument("--bytes", type=int, default=20_000_000)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=PATH:FIELD,FIELD", help="evaluation set")
    parser.add_argument("--peer-python", help="Python with datatrove, spacy and py3langid")
    parser.add_argument("--peer-bytes", type=int, default=1_500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = documents(given.documents, given.bytes)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        sets = tuple(map(given_set, given.set)) or (planted(Path(folder)),)
        settings = Contamination(sets=sets)
        ours = passes(settings)
        for run in ours.values():  # loads models and tables and compiles
            for text in ("short", "köŕter", *texts[:3]):
                run(text)
        best: dict[str, float] = dict.fromkeys(ours, 0.0)
        for _ in range(given.rounds):
            for name, run in ours.items():
                best[name] = max(best[name], rate(run, texts, megabytes))
        peers: dict[str, float] = {}
        ratios: dict[str, float] = {}
        if given.peer_python:
            items = [texts for one in sets for texts in contamination.items(one)]
            share = texts[:: max(round(megabytes * 1e6 / given.peer_bytes), 1)]
            size = sum(len(text.encode()) for text in share) / 1e6
            same = {name: max(rate(run, share, size) for _ in range(given.rounds)) for name, run in ours.items()}
            job = {"texts": share, "items": items, "ngram": settings.ngram, "rounds": given.rounds}
            (Path(folder) / "job.json").write_text(json.dumps(job))
            worker = Path(__file__).with_name("text_passes_peer.py")
            done = subprocess.run(
                [given.peer_python, str(worker), str(Path(folder) / "job.json")],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"the peers failed:\n{done.stderr}")
            peers = json.loads(done.stdout.splitlines()[-1])
            ratios = {f"{ours_} / {theirs}": same[ours_] / peers[theirs] for ours_, theirs in PAIRS}
    print(f"{len(texts)} documents, {megabytes:.1f} MB; MB of text per CPU-second")
    for name, found in {**best, **peers}.items():
        print(f"  {name:<76} {found:8.2f}")
    for name, found in ratios.items():
        print(f"  {name:<76} {found:8.1f} x")
    if given.json:
        row = {
            "documents": len(texts),
            "megabytes": round(megabytes, 1),
            "ours": best,
            "peers": peers,
            "ratios": ratios,
        }
        given.json.write_text(json.dumps({"machine": describe(rounds=given.rounds), **row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
