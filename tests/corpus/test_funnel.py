"""Terminal output of a corpus: why documents were dropped, where, and which files were not read."""

import gzip
import json
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.common.console import QUIET
from bessemer.common.errors import InputError
from bessemer.corpus.extract.webpage import ALL_TEXT
from bessemer.corpus.statistics import MAX_LINES, funnel_lines, loss_warnings
from bessemer.run.directory import RunDirectory
from tests.corpus.corpus_samples import prose, recipe

LONG = "min_characters = 200"


def lines_of(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_even_little_damage_is_shown(data: Path, build) -> None:
    for number in range(3):
        (data / f"good{number}.txt").write_text(prose(number))
        (data / f"short{number}.txt").write_text("short")
    (data / "half.txt.gz").write_bytes(gzip.compress(prose(7).encode())[:200])
    _, _, statistics = build(recipe({"name": "text", "format": "text", "paths": [str(data)]}, rules=LONG))
    assert [line.split()[:2] for line in funnel_lines(statistics)] == [["unreadable", "1"], ["too_short", "3"]]


def test_the_funnel_has_five_lines_and_its_counts_are_those_of_the_statistics(data: Path, build) -> None:
    for number in range(3):
        (data / f"good{number}.txt").write_text(prose(number))
        (data / f"short{number}.txt").write_text("short")
    for name, content in {
        "empty.txt": b" ", "archive.txt": b"PK\x03\x04", "marks.txt": b"+-*/ ()[]\n" * 40, "latin.txt": b"\xe9" * 300,
        "same.txt": b"the same line again\n" * 40, "copy.txt": prose(1).encode(), "a.pdf": b"%PDF-1.7", "b.PDF": b"%PDF-1.7",
        "c.docx": b"PK", "more.jsonl": lines_of(prose(9)),
    }.items():  # fmt: skip
        (data / name).write_bytes(content)
    text, more = ({"name": n, "format": n, "paths": [str(data)]} for n in ("text", "jsonl"))
    _, rejected, statistics = build(recipe(text, more, rules=LONG))
    shown = funnel_lines(statistics)
    assert len(shown) == MAX_LINES
    assert shown[0].startswith("too_short")
    assert sum(int(line.split()[2 if "more" in line else 1]) for line in shown[:-1]) == len(rejected)
    assert shown[-1].split()[:4] == ["files", "not", "read", "3"]  # the other source reads more.jsonl
    assert shown[-1].endswith("2 .pdf, 1 .docx")
    assert statistics["sources"][1]["not_read"][".pdf"] == {"files": 2, "bytes": 16, "example": "data/a.pdf"}


def test_pages_extracted_by_a_fallback_are_counted(data: Path, build) -> None:
    for name, depth in (("a.html", 0), ("b.html", 600)):
        (data / name).write_text("<div>" * depth + "".join(f"<p>{line}</p>" for line in prose(depth).split("\n")))
    documents, _, statistics = build(recipe({"name": "s", "format": "html", "paths": [str(data)]}))
    assert sorted(json.loads(each["metadata"]).get("extraction", "") for each in documents) == ["", ALL_TEXT]
    (line,) = funnel_lines(statistics)
    assert line.split()[:3] == ["extraction", "1", "50%"] and line.endswith(f"not dropped: {ALL_TEXT}")


@pytest.mark.parametrize("format_", ["text", "html", "jsonl", "chat"])
def test_control_characters_are_replaced_and_counted_in_every_format(format_: str, data: Path, build) -> None:
    """resiliparse itself returns only control characters of Windows-1252."""
    controls = "" if format_ == "html" else "first\x0csecond\x1fthird"
    text = f"{prose(1)}\n{controls} don\x92t"
    if format_ in ("jsonl", "chat"):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text, "reasoning": text}]
        record = {"text": text} if format_ == "jsonl" else {"messages": messages}
        (data / "a.jsonl").write_text(json.dumps(record) + "\n")
    else:
        (data / ("a.html" if format_ == "html" else "a.txt")).write_text(
            f"<p>{text}</p>" if format_ == "html" else text
        )
    more = "[tokens]\npacking = 'best-fit'\ndocument_mask = true" if format_ == "chat" else ""
    documents, _, statistics = build(recipe({"name": "s", "format": format_, "paths": [str(data)]}, rules=more))
    times = 2 if format_ == "chat" else 1
    counted = {"Windows-1252": times} | ({"separators": 2 * times} if controls else {})
    assert statistics["totals"]["tables"]["replaced_characters"] == counted
    shown = documents[0]["text"]
    if format_ == "chat":
        assert "\n" not in shown
        shown = json.loads(shown)[1]["reasoning"]
    expected = "first\nsecond third don’t" if controls else "don’t"
    assert shown.endswith(expected)


def test_the_command_shows_the_funnel_and_json_has_all_of_it(
    data: Path, run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUIET, "0")
    (data / "a.jsonl").write_bytes(lines_of(prose(1), "[red]short"))
    (data / "b.pdf").write_text("%PDF-1.7")
    (data / "my.toml").write_text(
        f'[run]\nname = "t"\ndir = "{run.path}"\n[[corpus.sources]]\nname = "s"\nformat = "jsonl"\npaths = ["."]\n[corpus.rules]\n{LONG}\n'
    )
    assert run_command(["corpus", str(data / "my.toml")]) == 0
    assert "1 of 2 documents kept" in capsys.readouterr().err
    assert run_command(["corpus", str(data / "my.toml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["corpus"]
    assert found["totals"]["rejected"] == {"too_short": 1}
    assert found["sources"][0]["rejected"]["too_short"]["examples"][0]["path"] == "data/a.jsonl"


def test_a_missing_label_is_reported(data: Path, build) -> None:
    (data / "a.jsonl").write_text(json.dumps({"text": prose(1), "sort": "x"}))
    with pytest.raises(InputError, match="no_label.*set corpus.sources.s.label_key=NAME"):
        build(recipe({"name": "s", "format": "jsonl", "paths": [str(data)], "label_key": "kind"}))


REVIEWS = [f"{word} {number}" for number in range(40) for word in ("Great", "Bad!!", "no", ":-)")]


@pytest.mark.parametrize("ending", ["jsonl", "txt", "html"])
@pytest.mark.parametrize("labelled", [False, True])
def test_rules_for_web_pages_apply_only_to_web_pages(data: Path, build, ending: str, labelled: bool) -> None:
    """Short records of every format are kept. Pages are not, unless they are labelled or the recipe allows it."""
    rows = [{"text": text, "kind": "ab"[number % 2]} for number, text in enumerate(REVIEWS)]
    if ending != "jsonl":
        for number, text in enumerate(REVIEWS):
            (data / f"{number}.{ending}").write_text(
                f"<html><body><p>{text}</p></body></html>" if ending == "html" else text
            )
    else:
        (data / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "s", "paths": [str(data)]}
    if labelled:
        source |= {"label": "a"} if ending != "jsonl" else {"label_key": "kind"}
    if ending == "html":  # a page that is long enough to keep
        (data / "long.html").write_text("".join(f"<p>{line}</p>" for line in prose(1).split("\n")))
    documents, rejected, statistics = build(recipe(source))
    short = [row for row in documents if len(row["text"]) < 200]
    if ending == "html" and not labelled:
        assert not short and {row["reason"] for row in rejected} <= {"too_short", "empty"}
        (warning,) = loss_warnings(statistics)
        assert "corpus.sources.s" in warning and "corpus.rules.min_characters" in warning and "too_short" in warning
    else:
        assert len(short) == len(REVIEWS) and not rejected and not loss_warnings(statistics)
    documents, rejected, _ = build(recipe(source, rules="min_characters = 7"))
    assert all(len(row["text"]) >= 7 for row in documents)
    assert {row["reason"] for row in rejected} - {"empty"} == {"too_short"}


def test_unlabelled_records_must_look_like_text(data: Path, build) -> None:
    """Rules that protect every source apply. A class label means that a person wanted the record."""
    odd = ["👍👍👍 :-) !!!", "same\n" * 20, "0.125 3e-5;" * 300]
    (data / "a.jsonl").write_text("".join(json.dumps({"text": text, "kind": "x"}) + "\n" for text in [prose(1), *odd]))
    source = {"name": "s", "format": "jsonl", "paths": [str(data)]}
    _, rejected, statistics = build(recipe(source))
    assert sorted(row["reason"] for row in rejected) == ["long_lines", "not_text", "repetitive"]
    assert len(loss_warnings(statistics)) == 1
    documents, rejected, _ = build(recipe({**source, "label_key": "kind"}))
    assert (len(documents), rejected) == (4, [])
    rules = "min_alphanumeric_share = 0.25\nmin_unique_line_share = 0.2\nmax_mean_line_length = 1000"
    assert len(build(recipe({**source, "label_key": "kind"}, rules=rules))[1]) == 3
