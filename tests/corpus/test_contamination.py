import gzip
import json
import random
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("numba", reason="the corpus extra is not installed")

from bessemer.common.errors import InputError
from bessemer.corpus.document import Document
from bessemer.corpus.filters.chain import Chain, Tally
from bessemer.corpus.filters.contamination import NO_OVERLAP, build, check, items, statistics
from bessemer.corpus.inputs import inputs_digest
from bessemer.recipe import Contamination, Corpus, EvaluationSet, Recipe

WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem",
]  # fmt: skip


def sentence(seed: int, length: int = 20) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def quiz(tmp_path: Path) -> EvaluationSet:
    """Ten questions of 20 words with answers of 9, and one of 3 words, too short to search for."""
    rows = [{"id": n, "question": sentence(n) + "?", "answers": [sentence(100 + n, 9)]} for n in range(10)]
    rows.append({"id": 10, "question": "Who was it?", "answers": []})
    return EvaluationSet(name="quiz", path=written(tmp_path / "quiz.jsonl", rows), fields=["question", "answers"])


def settings(*sets: EvaluationSet, **keys: Any) -> Contamination:
    return Contamination(sets=sets, **keys)


def test_every_item_is_found_where_it_was_planted_and_nowhere_else(quiz: EvaluationSet) -> None:
    index = build(settings(quiz))
    for number in range(10):
        text = f"{sentence(1000 + number, 200)}\n{sentence(number).upper()}... {sentence(2000 + number, 200)}"
        found = check(text, index)
        assert found.items == {"quiz": (number,)}
        ((start, end),) = found.spans
        assert text[start:end] == sentence(number).upper()
        assert check(text[:start] + text[end:], index) is NO_OVERLAP


QUESTION, ANSWER = sentence(3).split(), sentence(105, 9).split()


@pytest.mark.parametrize(
    ("words", "keys", "number"),
    [
        (QUESTION[4:17], {}, 3), (QUESTION[4:16], {}, None), (QUESTION[4:16], {"ngram": 12}, 3),  # 13 words by default
        (ANSWER, {}, 5), (ANSWER[:-1], {}, None), (ANSWER, {"min_words": 10}, None),  # short texts as a whole
        # 4 of the question's 8 n-grams, and not the answer: 4 of 9
        (QUESTION[:16], {"min_share": 4 / 9}, 3), (QUESTION[:16], {"min_share": 0.45}, None),
    ],
)  # fmt: skip
def test_settings_decide_what_is_found(
    words: list[str], keys: dict[str, Any], number: int | None, quiz: EvaluationSet
) -> None:
    found = check(f"before {' '.join(words)} after", build(settings(quiz, **keys)))
    assert found.items == ({} if number is None else {"quiz": (number,)})


def test_an_ngram_of_two_sets_counts_for_both(tmp_path: Path, quiz: EvaluationSet) -> None:
    other = EvaluationSet(name="other", path=str(tmp_path / "other.txt"))
    Path(other.path).write_text(f"{sentence(50)}\n\n{sentence(3)}\n")
    index = build(settings(quiz, other))
    assert check(sentence(3), index).items == {"quiz": (3,), "other": (1,)}
    assert check(sentence(50), index).items == {"other": (0,)}
    assert check("nothing of the kind", index) == NO_OVERLAP


ITEM = "Où est passé le garçon naïf? «C’était l’été», dit-elle; ﬁn de l’histoire du café, n° ½ ΣΟΦΟΣ ガス 한국어 İstanbul sınıf عربي"
CHANGES: list[Callable[[str], str]] = [
    *(partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")),
    str.upper,
    str.casefold,
    lambda text: text.replace("ガ", "ｶﾞ").replace("ス", "ｽ").replace("عر", "عـــر"),
    lambda text: text.replace("’", "'").replace("«", '"').replace(" ", "\u00a0"),
    lambda text: text.replace("s", "s\u00ad").replace("t", "\u200bt"),
    lambda text: text.replace(" ", "\r\n\x0b"),
    lambda text: "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_item_is_found_in_any_spelling_of_set_and_document(tmp_path: Path, change: Callable[[str], str]) -> None:
    """Search through the cleaning steps; spans are in the document's own characters."""
    item = change(ITEM)
    sets = [{"name": "set", "path": written(tmp_path / "set.jsonl", [{"q": item}]), "fields": ["q"]}]
    for other in CHANGES:
        for action, text in (("drop", None), ("mask", f"{sentence(1)}. {{}}")):
            corpus = Corpus(contamination={"sets": sets, "action": action, "mask": "{}"})
            record = Document("", 1, f"{sentence(1)}. {other(ITEM)}\n")
            Chain.prepare(corpus).clean(record, Tally())
            assert record.metadata["contamination"] == {"set": [0]}
            assert (record.reason is None) == (action == "mask")
            assert text is None or record.text == text


def test_personal_data_does_not_hide_an_item(tmp_path: Path) -> None:
    item = "write to anna.berg@gmx.org or call bo@firma.de and dan@haus.net before noon today"
    sets = [{"name": "set", "path": written(tmp_path / "set.jsonl", [{"q": item}]), "fields": ["q"]}]
    chain = Chain.prepare(Corpus(contamination={"sets": sets}, personal={"kinds": ["email"]}))
    record = Document("", 1, f"{sentence(1)}. {item}. {sentence(2)} someone@gmx.org")
    chain.clean(record, Tally())
    assert record.reason == "contaminated"


def test_the_contamination_table(quiz: EvaluationSet) -> None:
    index = build(settings(quiz))
    documents = [sentence(1), sentence(1) + ". " + sentence(2), "nothing of the kind", sentence(104, 9)]
    found = [check(text, index) for text in documents]
    touched = {f"{name}/{number}" for overlap in found for name, numbers in overlap.items.items() for number in numbers}
    (row,) = statistics(index, {"quiz": sum(bool(overlap.items) for overlap in found)}, touched)
    assert not check("Who was it?", index).items and index.unsearched == (1,)
    assert check("Who was it?", build(settings(quiz, min_words=3))).items == {"quiz": (10,)}
    assert row == {"name": "quiz", "items": 11, "searched": 10, "items_touched": 3, "documents": 3, "share": 3 / 10}


def test_the_search_agrees_with_plain_string_search(quiz: EvaluationSet) -> None:
    """Documents of the same few words, so that n-grams of 4 occur in them by chance."""
    index = build(settings(quiz, ngram=4, min_words=4))
    grams: dict[tuple[str, ...], set[int]] = {}
    for number, texts in enumerate(items(quiz)):
        for text in texts:
            words = text.lower().replace("?", "").split()
            for at in range(len(words) - 3):
                grams.setdefault(tuple(words[at : at + 4]), set()).add(number)
    hits = 0
    for seed in range(150):
        text = sentence(5000 + seed, 150)
        words = text.split()
        expected = {n for at in range(147) for n in grams.get(tuple(words[at : at + 4]), ())}
        assert set(check(text, index).items.get("quiz", ())) == expected
        hits += bool(expected)
    assert hits > 25


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_sets_are_read_in_every_format(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"set.{ending}"
    rows = [{"q": sentence(n), "n": n} for n in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif ending == "jsonl.zst":
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    else:
        path.write_text("\n".join(str(row["q"]) for row in rows))
    given = EvaluationSet(name="set", path=str(path), fields=[] if ending == "txt" else ["q"])
    assert list(items(given)) == [[row["q"]] for row in rows]


def test_fields_with_lists_and_tables(tmp_path: Path) -> None:
    row = {"choices": {"text": ["one", "two"], "label": [0, 1]}, "gold": None, "n": 3}
    path = written(tmp_path / "set.jsonl", [row])
    assert list(items(EvaluationSet(name="set", path=path, fields=["choices", "gold", "n"]))) == [["one", "two"]]


LINES = [
    b'{"q": "x"}\n{"q": \n', b"[1]\n", b'{"p": "x"}\n', b'{"q": "\xff"}\n', b"", b'{"q": "short"}\n', b"[" * 100_000 + b"\n", None,
]  # fmt: skip
DAMAGED = [(ending, b"\x1f\x8b\x08 not what it says") for ending in ("parquet", "jsonl.gz", "jsonl.zst")]


@pytest.mark.parametrize(
    ("ending", "content"), [*(("jsonl", line) for line in LINES), *DAMAGED], ids=lambda x: str(x)[:20]
)
def test_unusable_sets_are_errors(tmp_path: Path, ending: str, content: bytes | None) -> None:
    path = tmp_path / f"quiz.{ending}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="quiz" if ending == "jsonl" else "cannot be read"):
        build(settings(EvaluationSet(name="quiz", path=str(path), fields=["q"])))


def test_the_fingerprint_follows_the_files(quiz: EvaluationSet) -> None:
    of = Recipe.model_validate({"run": {"name": "t"}}).changed(corpus={"contamination": settings(quiz)})
    before = inputs_digest(of)
    Path(quiz.path).write_text(Path(quiz.path).read_text() + "\n")
    assert inputs_digest(of) != before
    Path(quiz.path).unlink()
    with pytest.raises(InputError, match=r"quiz: .*No such file"):
        build(settings(quiz))
