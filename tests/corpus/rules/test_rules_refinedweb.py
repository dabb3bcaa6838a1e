from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.filters.rules.apply import edit_refinedweb
from bessemer.corpus.filters.rules.lists import judge_url
from bessemer.recipe.rules import RefinedWeb
from bessemer.text.statistics import Statistics

BODY = "\n".join(f"A line of prose that stays where it is, number {number}" for number in range(20))


def edited(text: str, **settings: object) -> tuple[str, str | None]:
    found, finding = edit_refinedweb(Statistics(text), RefinedWeb(**settings))
    return found.text, finding and finding.reason


@pytest.mark.parametrize(
    "line",
    ["MENU AND MORE", "ABCDE def", "12345678", "3 likes", "1,024 Views!", "1.2k followers", "single", "Sign-in", "3 items in cart"],
)  # fmt: skip
def test_removed_lines(line: str) -> None:
    expected = "3\n" if line == "3 items in cart" else ""
    assert edited(f"{line}\n{BODY}") == (f"{expected}{BODY}", None)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("two words", "two words"),
        ("ABCD def", "ABCD def"),  # 4 of 8 characters are capitals: half is allowed
        ("3 likes and more", "3 likes and more"),
        ("Sign-in to the page", "to the page"),
        ("the story so far Read more...", "the story so far"),
        ("you have 2 items in cart today", "you have 2 today"),
        ("sign-in " + "w " * 10 + "x", "sign-in " + "w " * 10 + "x"),  # longer than ten words
    ],
)
def test_kept_lines(line: str, left: str) -> None:
    assert edited(f"{line}\n{BODY}") == (f"{left}\n{BODY}", None)


def test_the_share_of_removed_words_at_its_limit() -> None:
    text = "WORD IN CAPITALS HERE NOW\n" + " ".join(["prose"] * 95)
    assert edited(text) == (" ".join(["prose"] * 95), None)  # 5 of 100
    assert edited(text, max_removed_word_share=0.049)[1] == "refinedweb.removed_words"
    assert edited("ONE TWO\n" + BODY, max_line_upper_share=1.0)[0] == "ONE TWO\n" + BODY


def test_urls(tmp_path: Path) -> None:
    def written(name: str, *lines: str) -> str:
        (tmp_path / name).write_text("# a comment\n" + "\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    settings = RefinedWeb(
        domains=written("domains", "bad.example", "Evil.co.uk"),
        urls=written("urls", "ok.example/one/page"),
        url_words=written("words", "casino"),
        url_soft_words=written("soft", "cam", "chat", "girl"),
        url_substrings=written("strings", "for-adults"),
    )

    def reason(url: str) -> str | None:
        finding = judge_url(url, settings)
        return finding and finding.reason

    assert reason("https://www.BAD.example/page") == "refinedweb.domain"
    assert reason("http://evil.co.uk:8080/") == "refinedweb.domain"
    assert reason("https://notbad.example/") is None
    assert reason("bad.example.org/") is None
    assert reason("https://ok.example/one/page/") == "refinedweb.url"
    assert reason("https://ok.example/one/page2") is None
    assert reason("https://x.org/the-Casino") == "refinedweb.url_word"
    assert reason("https://x.org/thecasinos") is None
    assert reason("https://x.org/cam/chat") == "refinedweb.url_soft_words"
    assert reason("https://x.org/cam/cam") is None
    assert reason("https://x.org/f.o-radults") == "refinedweb.url_substring"
    assert reason("not a url [at all") is None
    assert reason("http://[") is None
    assert reason("x" * 10_000_000) is None
    assert judge_url("https://bad.example", RefinedWeb()) is None
    with pytest.raises(InputError, match="corpus.rules.refinedweb.domains"):
        judge_url("https://x.org", RefinedWeb(domains=str(tmp_path / "nowhere")))
