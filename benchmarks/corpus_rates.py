"""Rates of the stages from a crawl to token shards, as `bessemer crawl` reads them (src/bessemer/plan/corpus_rates.json).

A folder of HTML pages is packed as a crawl archive, every tenth page a second time with a few words changed, and goes through
the pipeline in this process: each stage's CPU time is taken where the pipeline calls it, and divided into the bytes that came
to it. The texts are cut into documents of the size that the plan assumes, since a stage that looks at the beginning of a
document (language) costs by the document. Every rule set judges every document, with its defaults and until the first reason;
what goes on from there is what the basic rules keep. Medians of the rounds, after one that compiles.

    python benchmarks/corpus_rates.py --html FOLDER [--json FILE]

Without --json the rates, their date and machine in the package are replaced; its shares and sizes stay as they are. With
--repeats only the rates of what cuts repeated paragraphs and spans out are, and nothing is tokenised: those of the run, times
the median ratio of the package's rates of the other stages to the run's, since another machine measured these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
from machine import describe
from readers import pack

from bessemer.cli import run_command
from bessemer.corpus import clean, partition, publish, warc, whole
from bessemer.corpus.dedup.repeats import RepeatVerdicts, find_repeats
from bessemer.corpus.dedup.verdicts import ParquetPart
from bessemer.corpus.rules.apply import apply
from bessemer.recipe import Dedup, Paragraphs, Rules, Substrings
from bessemer.recipe.rules import C4, FineWeb, GopherQuality, GopherRepetition, Nemo, Textbook
from bessemer.tokens.tokenizer import Tokenizer

RATES = Path(__file__).parent.parent / "src" / "bessemer" / "plan" / "corpus_rates.json"
VOCABULARY = 32_000
END = "<|endoftext|>"
STAGES = {
    "read WARC": ("raw", "the archive's records, gzip by record, decompression included"),
    "extract": ("raw", "charset, resiliparse's main content"),
    "normalise": ("text", "NFC, line ends, control characters"),
    "language": ("text", "fastText lid.176, first 2,000 characters"),
    "rules": ("in_language", "Gopher quality and repetition, C4, FineWeb, NeMo, textbook; the first reason ends it"),
    "hash and sign": ("passed", "identity, BLAKE2b of the folded text, 140 MinHash values over 5-word shingles"),
    "write partitions": ("passed", "Parquet, zstd, sorted by identity"),
    "link duplicates": ("passed", "identities, hashes and signatures read, 20 bands of 7 linked"),
    "verify duplicates": ("passed", "texts with a candidate read again, folded and cut into shingles"),
    "publish": ("passed", "a bucket of all partitions read, merged and written again"),
    "tokenise": ("kept", f"byte-level BPE by tiktoken, GPT-4 pattern, {VOCABULARY} ids"),
}
"""Stage: whose bytes it is charged by, and what it is."""

REPEATS = {
    ("paragraphs", "paragraph"): Dedup(paragraphs=Paragraphs(mode="paragraph")),
    ("paragraphs", "ngram"): Dedup(paragraphs=Paragraphs(mode="ngram")),
    ("spans", "words"): Dedup(substrings=Substrings(unit="words")),
    ("spans", "bytes"): Dedup(substrings=Substrings(unit="bytes")),
}
"""By option of `bessemer crawl` and its value."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path, required=True, help="folder of .html files")
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RATES)
    parser.add_argument("--repeats", action="store_true", help="replace the rates of repeats alone")
    given = parser.parse_args()
    rates = json.loads(RATES.read_text(encoding="utf-8"))
    length = int(rates["sizes"]["document_bytes"]["value"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw = pack(planted(sorted(given.html.rglob("*.html"))[: given.pages], folder), folder / "pages.warc.gz")
        rounds = [
            Round(folder / str(number), folder / "pages.warc.gz", raw, length, not given.repeats)
            for number in range(given.rounds + 1)
        ]
        for one in rounds:
            one.run()
    measured = {}
    for stage, (of, what) in STAGES.items():
        if stage not in rounds[-1].seconds:
            continue
        found = [one.flow[of] / 1e6 / one.seconds[stage] for one in rounds[1:]]
        rate = float(f"{median(found):.2g}")
        measured[stage] = {"stage": stage, "of": of, "megabytes_per_cpu_second": rate, "with": what}
        print(f"{stage:<18}{rate:8.4g} MB of {of:<12} per CPU-second  ({', '.join(f'{one:.1f}' for one in found)})")
    scale = 1.0
    if given.repeats:
        before = {row["stage"]: row["megabytes_per_cpu_second"] for row in rates["stages"]}
        ratios = [before[stage] / row["megabytes_per_cpu_second"] for stage, row in measured.items()]
        scale, measured = median(ratios), {}
        print(f"the package's rates are {scale:.2f} times those of this run")
    repeats = [repeats_row(rounds[1:], *option, scale) for option in REPEATS]
    for row in repeats:
        print(row)
    stages = [measured.get(row["stage"], row) for row in rates["stages"] if "option" not in row]
    place = next(number for number, row in enumerate(stages) if row["stage"] == "publish")
    stages[place:place] = repeats
    if given.repeats:
        given.json.write_text(as_text(rates | {"stages": stages}), encoding="utf-8")
        return
    machine, last = describe(), rounds[-1].flow
    sizes = ", ".join(f"{of} {last[of] / 1e6:.1f} MB" for of in ("raw", "text", "passed", "kept"))
    rates |= {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, beside other work; CPU time",
        "measured_by": f"benchmarks/corpus_rates.py on {sizes}, in documents of {length} characters; MB are 10^6 bytes of what "
        f"comes to the stage, per CPU-second of one core, median of {given.rounds} rounds",
        # those of corpus_scale.py stay
        "stages": stages,
    }
    given.json.write_text(as_text(rates), encoding="utf-8")


def repeats_row(rounds: list[Round], option: str, value: str, scale: float) -> dict[str, Any]:
    """The stage that an option of `bessemer crawl` adds. exchanged: bytes that its tasks write, for a byte of text."""
    name, what = f"{option} {value}", {"paragraphs": "repeated lines", "spans": "repeated spans"}[option]
    rate = scale * median(one.flow[name] / 1e6 / one.seconds[name] for one in rounds)
    exchanged = median(one.exchanged[name] / one.flow[name] for one in rounds)
    return {
        "stage": f"{option}, {value}", "of": "kept", "megabytes_per_cpu_second": float(f"{rate:.2g}"),
        "with": f"{what} searched for (corpus.dedup) and cut out", "option": option, "value": value,
        "exchanged": float(f"{exchanged:.2g}"),
    }  # fmt: skip


def planted(pages: list[Path], folder: Path) -> list[Path]:
    """The pages, and every tenth of them once more with every 50th "the" changed."""
    copies = []
    for number, page in enumerate(pages[::10]):
        parts = page.read_bytes().split(b" the ")
        ends = [b" another " if place % 50 == 25 else b" the " for place in range(len(parts) - 1)] + [b""]
        copy = folder / f"copy{number}.html"
        copy.write_bytes(b"".join(part + end for part, end in zip(parts, ends, strict=True)))
        copies.append(copy)
    return pages + copies


RECIPE = """
[run]
name = "corpus"
dir = "{folder}"
[[corpus.sources]]
name = "crawl"
format = "warc"
paths = ["{archive}"]
[corpus]
workers = 1
[corpus.language]
identify = true
[corpus.dedup]
bands = 20
rows = 7
min_jaccard = 0.8
verify = true
[model]
depth = 2
"""

EVERY = Rules(
    gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition(), c4=C4(), fineweb=FineWeb(), nemo=Nemo(),
    textbook=Textbook(),
)  # fmt: skip


class Round:
    """One run of the pipeline: CPU seconds by stage, bytes by place in the flow."""

    def __init__(self, folder: Path, archive: Path, raw: int, length: int, tokenises: bool) -> None:
        self.folder, self.archive, self.length, self.tokenises = folder, archive, length, tokenises
        self.seconds: dict[str, float] = defaultdict(float)
        self.flow: dict[str, float] = defaultdict(float, raw=raw)
        self.exchanged: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        with self.clock("read WARC"), self.archive.open("rb") as file:
            for _ in warc._members(file, 0, self.archive.stat().st_size, "gzip"):
                pass
        self.folder.mkdir()
        recipe = self.folder / "recipe.toml"
        recipe.write_text(RECIPE.format(folder=self.folder, archive=self.archive))
        steps = {"normalise": self.normalise, "language": self.language, "rules": self.judge}
        with (
            patch.object(clean, "STEPS", tuple((name, steps.get(name, step)) for name, step in clean.STEPS)),
            patch.object(partition, "read", self.read),
            patch.object(partition, "_row", self.row),
            patch.object(partition, "_table", self.timed("hash and sign", partition._table)),
            patch.object(partition, "_write", self.timed("write partitions", partition._write)),
            patch.object(whole, "find_duplicates", self.duplicates),
            patch.object(publish.PublishBucket, "make", self.timed("publish", publish.PublishBucket.make)),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            if run_command(["corpus", str(recipe)]):
                raise SystemExit("the corpus could not be built")
        self.seconds["extract"] -= self.seconds["read WARC"]
        self.seconds["verify duplicates"] -= self.seconds["link duplicates"]
        texts = [text for table in self.documents() for text in table["text"].to_pylist()]
        self.flow["kept"] = sum(len(text.encode()) for text in texts)
        if not self.tokenises:
            return
        tokenizer = Tokenizer.train(texts[:2000], VOCABULARY, END)
        with self.clock("tokenise"):
            tokenizer.encode_batch(texts)

    def documents(self) -> Iterator[Any]:
        for path in sorted((self.folder / "corpus" / "corpus" / "documents").glob("*.parquet")):
            yield from ParquetPart(path)(["text"])

    @contextlib.contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        started = process_time()
        yield
        self.seconds[stage] += process_time() - started

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with self.clock(stage):
                return work(*given)

        return run

    def read(self, *given: Any) -> Iterator[Any]:
        found = READ(*given)
        while True:
            with self.clock("extract"):
                one = next(found, None)
            if one is None:
                return
            piece, record = one
            for start in range(0, max(len(record.text), 1), self.length):
                text = record.text[start : start + self.length]
                metadata = dict(record.metadata)
                yield piece, replace(record, text=text, key=f"{record.key}+{start}", metadata=metadata)

    def normalise(self, record: Any, *given: Any) -> None:
        self.flow["text"] += len(record.text.encode())
        with self.clock("normalise"):
            clean.normalise_text(record, *given)

    def language(self, *given: Any) -> None:
        with self.clock("language"):
            clean.identify_language(*given)

    def judge(self, record: Any, *given: Any) -> None:
        self.flow["in_language"] += len(record.text.encode())
        with self.clock("rules"):
            apply(record.text, EVERY, record.language)
        clean.judge_text(record, *given)

    def row(self, record: Any, *given: Any) -> dict[str, Any]:
        if record.reason is None:
            self.flow["passed"] += len(record.text.encode())
        with self.clock("hash and sign"):
            return ROW(record, *given)

    def duplicates(self, parts: Any, settings: Any, folder: Path, *given: Any) -> Any:
        with self.clock("link duplicates"):
            SEARCH(parts, settings.model_copy(update={"verify": False}), folder.with_name("linked"), *given)
        with self.clock("verify duplicates"):
            done = SEARCH(parts, settings, folder, *given)
        decided = whole.Decisions(verdicts=whole._verdicts(folder.parent, settings))
        self.search_repeats(
            [whole.BucketPart((one,), decided) for part in parts for one in part.buckets], folder, *given
        )
        return done

    def search_repeats(self, parts: Any, folder: Path, made_of: str, names: Any, perform: Any) -> None:
        """Search for each kind of repeats in what is no duplicate, and cut them out."""
        for (option, value), settings in REPEATS.items():
            name, place = f"{option} {value}", folder.with_name(f"{option}-{value}")

            def counting(tasks: Any, name: str = name) -> Any:
                done = perform(tasks)
                self.exchanged[name] += sum(sum(one["outputs"].values()) for one in done)
                return done

            with self.clock(name):
                first = find_repeats(parts, settings, place, made_of, counting)["first"]
            verdicts = RepeatVerdicts(place, first, settings)
            for number, part in enumerate(parts):
                table = pa.concat_tables(part(["text", "characters"]))
                self.flow[name] += pc.sum(pc.binary_length(table["text"])).as_py() or 0
                with self.clock(name):
                    verdicts(number, table)


READ, ROW, SEARCH = partition.read, partition._row, whole.find_duplicates


def as_text(rates: dict[str, Any]) -> str:
    """JSON with a line for each stage, share and size."""
    parts = []
    for name, value in rates.items():
        if isinstance(value, list):
            rows = [f"    {json.dumps(row)}" for row in value]
            parts.append(f'  "{name}": [\n' + ",\n".join(rows) + "\n  ]")
        elif isinstance(value, dict):
            rows = [f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()]
            parts.append(f'  "{name}": {{\n' + ",\n".join(rows) + "\n  }")
        else:
            parts.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
