from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.filters.rules.lists import judge_url
from bessemer.recipe import parse
from bessemer.recipe.rules import Refinedweb


def test_urls_are_judged_by_refinedweb_rules(tmp_path: Path) -> None:
    def written(name: str, *lines: str) -> str:
        (tmp_path / name).write_text("# a comment\n" + "\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    settings = Refinedweb(
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
    with pytest.raises(InputError, match="corpus.rules.refinedweb"):
        parse('[run]\nname = "t"\n[model]\ndepth = 2\n[corpus.rules.refinedweb]\n', "test")
    with pytest.raises(InputError, match="corpus.rules.refinedweb.domains"):
        judge_url("https://x.org", Refinedweb(domains=str(tmp_path / "nowhere")))
