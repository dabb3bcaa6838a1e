"""Documents with edits of known Jaccard, a search for duplicates among them, and a brute-force reference."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bessemer.corpus.dedup.search import DuplicateStep
from bessemer.corpus.dedup.task import EXACT, NEAR, ParquetPart
from bessemer.corpus.document import identity
from bessemer.corpus.global_steps import CorpusDocuments, Perform, perform_here, run_step
from bessemer.corpus.verdicts import read_table
from bessemer.recipe import Corpus, Dedup, Source
from bessemer.text.normalise import fold

KEPT = 0
DETAIL = re.compile(r"kept instead: (\w+)(?: of (.*?))?( \(\w+ Jaccard [0-9.]+\))?")
# letters of scripts without spaces between words
SCRIPTS = {
    "zh": "的一是不了人我在有他这中大来上国和地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里",
    "ja": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろアイウエオ日本語学生",
    "th": "กขคงจฉชซญดตถทธนบปผพฟภมยรลวศสหอะาิีุูเแโใไ่้", "lo": "ກຂຄງຈສຊຍດຕຖທນບປຜຝພຟມຢຣລວຫອຮະາິີຸູເແໂໃໄ",
    "km": "កខគឃងចឆជឈញដឋឌឍណតថទធនបផពភមយរលវសហឡអាិីុូេែៃោ", "my": "ကခဂဃငစဆဇဈညတထဒဓနပဖဗဘမယရလဝသဟအာိီုူေဲ",
    "bo": "ཀཁགངཅཆཇཉཏཐདནཔཕབམཙཚཛཝཞཟའཡརལཤསཧཨིེོུ་",
}  # fmt: skip

Document = dict[str, Any]


def document(key: int | str, text: str, source: str = "s", **more: Any) -> Document:
    return {
        "identity": identity(source, "f", str(key)), "source": source, "path": f"f{key}", "text": text,
        "characters": len(text), **more,
    }  # fmt: skip


class Verdict(NamedTuple):
    """Decision about a document."""

    kind: int  # KEPT, EXACT or NEAR
    keeper: str  # identity of the kept document; its own if it is kept
    similarity: float
    corpus: str | None = None  # the earlier corpus of the kept document


def search(
    documents: Sequence[Document] | pa.Table, settings: Dedup, folder: Path, sources: Sequence[str] = (),
    size: int = 1000, perform: Perform = perform_here,
) -> tuple[dict[str, Verdict], dict[str, Any]]:  # fmt: skip
    """Return the verdict on each document by identity, and the statistics, with documents in parts of `size`."""
    table = documents if isinstance(documents, pa.Table) else pa.Table.from_pylist(list(documents))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parts = []
    for number, start in enumerate(range(0, table.num_rows, size)):
        parts.append(ParquetPart(folder / f"{number:06d}.parquet"))
        pq.write_table(table.slice(start, size), parts[-1].path, row_group_size=max(size // 2, 1))
    corpus = Corpus(sources=tuple(Source(name=name, paths=("x",)) for name in sources))
    given = CorpusDocuments(parts, folder / "duplicates", "test", corpus, perform)
    found, verdicts = run_step(DuplicateStep(**dict(settings)), given), {}
    for number, part in enumerate(parts):
        for place, one in enumerate(part(["identity"])):
            names = one["identity"].to_pylist()
            verdicts |= {name: Verdict(KEPT, name, 1.0) for name in names}
            for row in read_table(given.folder / "verdicts" / f"{number:06d}" / f"{place:06d}.arrow").to_pylist():
                kept, corpus, near = DETAIL.fullmatch(row["detail"]).groups()  # type: ignore[union-attr]
                assert row["reason"] == ("near_duplicate" if near else "exact_duplicate")
                verdicts[names[row["row"]]] = Verdict(NEAR if near else EXACT, kept, round(row["score"], 4), corpus)
    return verdicts, found["statistics"]


def edited(words: list[str], changes: int, draw: random.Random) -> list[str]:
    """Return the words with some replaced by words that occur nowhere else."""
    changed = list(words)
    for place in draw.sample(range(len(words)), changes):
        changed[place] = f"x{draw.getrandbits(48):x}"
    return changed


def shingles(text: str, length: int = 5) -> set[tuple[str, ...]]:
    words = fold(text).split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def jaccard(left: str, right: str, length: int = 5) -> float:
    one, other = shingles(left, length), shingles(right, length)
    return len(one & other) / len(one | other) if one | other else 0.0


def all_pairs_components(texts: list[str], least: float) -> list[int]:
    """Return for each text the smallest number in its component, with all pairs of at least that Jaccard linked."""
    component = list(range(len(texts)))

    def root(number: int) -> int:
        while component[number] != number:
            number = component[number]
        return number

    sets = [shingles(text) for text in texts]
    for right in range(len(texts)):
        for left in range(right):
            union = len(sets[left] | sets[right])
            if union and len(sets[left] & sets[right]) / union >= least:
                low, high = sorted((root(left), root(right)))
                component[high] = low
    return [root(number) for number in range(len(texts))]
