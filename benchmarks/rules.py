"""Speed of the rule sets in MB of text per CPU-second, and agreement of their decisions with datatrove's filters.

The documents are found on any machine: the standard library, installed packages and their descriptions, Python's help texts. With
--folder they include the .txt, .rst, .md and .html files of a folder (unpacked Debian documentation packages work well). HTML is
extracted with resiliparse. Both sides get the same documents, one at a time, in one thread.

    python benchmarks/rules.py --datatrove-python PYTHON [--folder FOLDER] [--megabytes 12] --json FILE
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from time import process_time
from typing import Any

import numpy as np
from machine import describe

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.rules.apply import CITATION, apply, check, edit_c4
from bessemer.recipe import Rules
from bessemer.recipe.rules import C4, Fineweb, GopherQuality, GopherRepetition
from bessemer.text import words
from bessemer.text.statistics import Statistics

FILTERS: dict[str, Callable[[str], Reject | None]] = {
    "gopher_quality": lambda text: check("gopher_quality", Statistics(text), GopherQuality()),
    "gopher_repetition": lambda text: check("gopher_repetition", Statistics(text), GopherRepetition()),
    "c4": lambda text: edit_c4(Statistics(text), C4())[1],
    "fineweb": lambda text: check("fineweb", Statistics(text), Fineweb()),
}
REASONS = {
    "gopher_short_doc": "few_words", "gopher_long_doc": "many_words", "gopher_below_avg_threshold": "short_words",
    "gopher_above_avg_threshold": "long_words", "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses", "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines", "gopher_below_alpha_threshold": "alphabetic_words",
    "gopher_enough_stop_words": "stop_words", "dup_para_frac": "paragraphs",
    "dup_para_char_frac": "paragraph_characters", "dup_line_frac": "lines", "dup_line_char_frac": "line_characters",
    **{f"top_{n}_gram": f"top_{n}gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate_{n}grams" for n in range(5, 11)},
    "lorem_ipsum": "lorem_ipsum", "curly_bracket": "curly_bracket", "too_few_sentences": "sentences",
    "line_punct_ratio": "terminal_lines", "empty": "terminal_lines", "short_line_ratio": "short_lines",
    "char_dup_ratio": "duplicate_characters", "list_ratio": "line_feeds",
}  # fmt: skip
"""Our name for each of datatrove's reasons."""
LONGEST = 400_000
"""Characters of the longest document: datatrove's splitter needs seconds for a longer one."""


def documents(folder: Path | None, megabytes: float) -> list[tuple[str, str]]:
    """Return about `megabytes` MB of (kind, text), with an equal number of documents per kind, drawn with a fixed seed."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    pools: dict[str, list[Path]] = {
        "standard library": [path for path in sorted(library.rglob("*.py")) if packages not in path.parents],
        "installed code": sorted(packages.rglob("*.py")),
        "descriptions": sorted(packages.glob("*.dist-info/METADATA")),
    }
    if folder is not None:
        for ending in ("txt", "rst", "md", "html"):
            if found := sorted(folder.rglob(f"*.{ending}")):
                pools[f".{ending} of the folder"] = found
    drawn = random.Random(0)
    orders = {kind: iter(drawn.sample(paths, len(paths))) for kind, paths in pools.items()}
    chosen = [("help topics", text) for _, text in sorted(topics.items())]
    size = sum(len(text.encode()) for _, text in chosen)
    while orders and size < megabytes * 1e6:
        for kind in list(orders):
            text = next(_texts(orders[kind]), None)
            if text is None:
                del orders[kind]
            elif 100 <= len(text) <= LONGEST:
                chosen.append((kind, text))
                size += len(text.encode())
    return chosen


def _texts(paths: Iterator[Path]) -> Iterator[str]:
    from resiliparse.extract.html2text import extract_plain_text

    for path in paths:
        if path.is_file():
            text = path.read_bytes().decode("utf-8", "replace")
            yield extract_plain_text(text) if path.suffix == ".html" else text


def our_sentences(text: str) -> dict[str, int]:
    """Return our number of sentences of every line of a text, with and without citations, as input for the peer."""
    lines = {line.strip() for line in text.splitlines()}
    lines |= {CITATION.sub("", line) for line in lines}
    return {line: Statistics(line).sentences for line in lines}


def best_of(rounds: int, work: Callable[[], Any]) -> float:
    """Return the CPU seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        started = process_time()
        work()
        seconds.append(process_time() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--datatrove-python", required=True, type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=12.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=int, default=0, help="number of disagreements to print per filter")
    given = parser.parse_args()
    chosen = documents(given.folder, given.megabytes)
    texts = [text for _, text in chosen]
    size = sum(len(text.encode()) for text in texts) / 1e6
    kinds = dict(Counter(kind for kind, _ in chosen))
    print(f"{len(texts)} documents, {size:.1f} MB: {kinds}")

    every = Rules(
        min_characters=0, max_characters=10**9, max_mean_line_length=1e9, min_alphanumeric_share=0.0,
        min_unique_line_share=0.0, gopher_quality=GopherQuality(), gopher_repetition=GopherRepetition(), c4=C4(),
        fineweb=Fineweb(),
    )  # fmt: skip
    for decide in FILTERS.values():
        decide(texts[0])  # compiles before the clock starts
    decisions: dict[str, list[str | None]] = {}
    seconds: dict[str, float] = {}
    for name, decide in FILTERS.items():
        seconds[name] = best_of(3, lambda decide=decide: [decide(text) for text in texts])
        decisions[name] = [finding and finding.reason.partition(".")[2] for finding in map(decide, texts)]
    seconds["all"] = best_of(3, lambda: [apply(text, every) for text in texts])
    seconds["words alone"] = best_of(3, lambda: [Statistics(text).word_spans for text in texts])
    edits = [edit_c4(Statistics(text), C4()) for text in texts]

    with tempfile.TemporaryDirectory() as place:
        there, split, out = Path(place) / "documents", Path(place) / "split", Path(place) / "out"
        with there.open("w") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        with split.open("w") as stream:
            for text in texts:
                found = words.split(np.frombuffer(text.encode("utf-32-le"), np.uint32))
                row = {"words": [array.tolist() for array in found], "sentences": our_sentences(text)}
                stream.write(json.dumps(row) + "\n")
        script = Path(__file__).with_name("rules_datatrove.py")
        subprocess.run([given.datatrove_python, script, there, split, out], check=True)
        peer = json.loads(out.read_text())
        peer_version = subprocess.run(
            [given.datatrove_python, "-c", "from importlib.metadata import version as v; print(v('datatrove'), v('spacy'))"],
            check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip

    same_words = sum(peer["same_words"])
    print(f"\nsame words: {same_words} of {len(texts)} documents ({100 * same_words / len(texts):.2f}%)")
    rows = []
    print(
        f"\n{'filter':18} {'ours MB/s':>10} {'datatrove':>10} {'ratio':>6}  {'same, own words':>16} {'same, our words':>16}"
    )
    for name in [*FILTERS, "all"]:
        row: dict[str, Any] = {
            "filter": name,
            "bessemer_mb_per_cpu_second": size / seconds[name],
            "datatrove_mb_per_cpu_second": size / peer["seconds"][name],
            "ratio": peer["seconds"][name] / seconds[name],
        }
        if name != "all":
            for way in ("own", "ours"):
                theirs = [reason and REASONS.get(reason, reason) for reason in peer[way][name]]
                pairs = list(zip(decisions[name], theirs, strict=True))
                classes = Counter(f"{a or 'kept'} / {b or 'kept'}" for a, b in pairs if a != b)
                row[f"same_decision_{way}"] = sum((a is None) == (b is None) for a, b in pairs) / len(pairs)
                row[f"same_reason_{way}"] = sum(a == b for a, b in pairs) / len(pairs)
                row[f"disagreements_{way}"] = dict(classes)
                shown = [index for index, (a, b) in enumerate(pairs) if a != b][: given.show]
                for index in shown:
                    kind, text = chosen[index]
                    print(f"  {name} {way}: {pairs[index]} {kind} {len(text)} characters: {text[:100]!r}")
            row["kept"] = decisions[name].count(None)
        rows.append(row)
        agreement = "".join(
            f"{row[f'same_decision_{way}']:>16.2%} " if name != "all" else "" for way in ("own", "ours")
        )
        print(
            f"{name:18} {row['bessemer_mb_per_cpu_second']:>10.1f} {row['datatrove_mb_per_cpu_second']:>10.2f} "
            f"{row['ratio']:>6.0f}  {agreement}"
        )
    same_text = sum(
        mine[0].text == theirs for mine, theirs in zip(edits, peer["texts"]["c4"], strict=True) if theirs is not None
    )
    kept_texts = sum(theirs is not None for theirs in peer["texts"]["c4"])
    print(f"\nc4, equal texts: {same_text} of {kept_texts} documents that datatrove keeps")
    print(f"words alone: {size / seconds['words alone']:.1f} MB per CPU-second")
    for row in rows:
        for way in ("own", "ours"):
            if row.get(f"disagreements_{way}"):
                print(f"  {row['filter']}, {way} words (ours / datatrove): {row[f'disagreements_{way}']}")
    if given.json:
        result = {
            "machine": describe(datatrove=peer_version[0], spacy=peer_version[1], numba=version("numba")),
            "documents": len(texts),
            "megabytes": size,
            "kinds": kinds,
            "same_words": same_words / len(texts),
            "c4_same_text": [same_text, kept_texts],
            "words_mb_per_cpu_second": size / seconds["words alone"],
            "rows": rows,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
