"""Planted duplicates are found and the right copy is kept when a corpus is built."""

import random
from pathlib import Path

import pytest
from corpus_samples import prose, recipe
from dedup_samples import SCRIPTS

from bessemer.corpus.document import identity


def words(seed: int, num_words: int = 400) -> list[str]:
    return prose(seed, num_words).split()


def lines(of: list[str]) -> str:
    return "\n".join(" ".join(of[start : start + 10]) for start in range(0, len(of), 10))


def reasons(rejected: list[dict[str, str]]) -> dict[str, str]:
    return {row["path"].rpartition("/")[2]: row["reason"] for row in rejected}


def test_exact_duplicates_differ_in_case_and_space_only(data: Path, build) -> None:
    text = prose(1)
    other = "  " + text.replace("\n", "\r\n\r\n")
    for name, content in (("a.txt", text), ("b.txt", text.upper()), ("c.txt", other), ("d.txt", prose(2))):
        (data / name).write_text(content, newline="")
    documents, rejected, _ = build(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    same = sorted(identity("s", f"data/{name}", "") for name in ("a.txt", "b.txt", "c.txt"))
    assert {row["identity"] for row in documents} == {same[0], identity("s", "data/d.txt", "")}
    assert [row["identity"] for row in rejected] == same[1:]
    for row in rejected:
        assert row["reason"] == "exact_duplicate"
        assert row["detail"] == f"kept instead: {same[0]}"


def test_the_longest_of_near_duplicates_is_kept(data: Path, build) -> None:
    base = words(1)
    (data / "short.txt").write_text(lines(base[:390]))
    (data / "long.txt").write_text(lines([*base, "and", "one", "more", "line"]))
    (data / "middle.txt").write_text(lines(base))
    (data / "upper.txt").write_text(lines(base).upper())
    (data / "other.txt").write_text(lines(words(2)))
    documents, rejected, _ = build(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    assert {row["path"] for row in documents} == {"data/long.txt", "data/other.txt"}
    assert all(identity("s", "data/long.txt", "") in row["detail"] for row in rejected), "also of the exact duplicate"
    # Of the 400 five-word shingles of the longest text, the others share 386 and 396 and have no others.
    shares = sorted((row["reason"], row["detail"].partition(" (")[2]) for row in rejected)
    near = [("near_duplicate", f"verified Jaccard {share})") for share in (0.96, 0.99)]
    assert [reason for reason, _ in shares] == ["exact_duplicate", "near_duplicate", "near_duplicate"] and shares[
        1:
    ] == near


@pytest.mark.parametrize("script", ["zh", "th", "bo"])
def test_near_duplicates_of_scripts_without_spaces(data: Path, build, script: str) -> None:
    """One character of a paragraph changes: in the script alone, among punctuated sentences, and next to English."""
    draw, texts = random.Random(script), list[str]()
    for number in range(30):
        run = "".join(draw.choices(SCRIPTS[script], k=120))
        text = (run, f"{run[:40]}。 {run[40:80]}, {run[80:]}!", f"{prose(number, 30)} {run} {prose(900 + number, 30)}")[
            number % 3
        ]
        place = text.index(run[20])
        texts += [text, text[:place] + SCRIPTS[script][-1 - (SCRIPTS[script][-1] == run[20])] + text[place + 1 :]]
    for number, text in enumerate(texts):
        (data / f"{number:02d}.txt").write_text(text)
    source = {"name": "s", "format": "text", "paths": [str(data)]}
    documents, rejected, _ = build(recipe(source))
    kept = sorted(int(row["path"].rpartition("/")[2][:2]) // 2 for row in documents)
    assert kept == list(range(30)) and set(reasons(rejected).values()) == {"near_duplicate"}


@pytest.mark.parametrize(("setting", "expected"), [("exact = false", 1), ("minhash = false", 2)])
def test_each_kind_can_be_turned_off(data: Path, build, setting: str, expected: int) -> None:
    base = words(1)
    (data / "a.txt").write_text(lines(base))
    (data / "b.txt").write_text(lines(base))
    (data / "c.txt").write_text(lines([*base, "more", "words"]))
    source = {"name": "s", "format": "text", "paths": [str(data)]}
    documents, _, _ = build(recipe(source, dedup=setting))
    assert len(documents) == expected


def test_documents_of_an_earlier_run_are_dropped_and_named(data: Path, build, run, tmp_path: Path) -> None:
    (data / "old.txt").write_text(lines(words(1)))
    source = {"name": "s", "format": "text", "paths": [str(data)]}
    build(recipe(source))
    earlier = tmp_path / "earlier"
    run.corpus.parent.rename(earlier)
    (data / "near.txt").write_text(lines([*words(1), "more"]))
    (data / "new.txt").write_text(lines(words(2)))
    documents, rejected, _ = build(recipe(source, dedup=f"against = ['{earlier}']"))
    assert [row["path"] for row in documents] == ["data/new.txt"]
    assert reasons(rejected) == {"old.txt": "exact_duplicate", "near.txt": "near_duplicate"}
    old = identity("s", "data/old.txt", "")
    assert all(row["detail"].startswith(f"kept instead: {old} of {earlier}") for row in rejected)
