"""Documents that take too long: their worker ends, the next one skips them, and all others are kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.run_tasks.time_limit import slow_documents
from tests.corpus.corpus_samples import prose, recipe
from tests.corpus.mediawiki_samples import HEAD, page

# Each worker reads this at its start: pages with a mark take as long as a parser that hangs, unless they are skipped.
SLOW_PAGES = """
import time
from bessemer.run_tasks import time_limit
from bessemer.corpus.extract import webpage
page_text = webpage.page_text
def slow(html, *rest):
    if "HANGS" in html and not time_limit.is_left_out():
        time.sleep(600)
    return page_text(html, *rest)
webpage.page_text = slow
"""

READER = """
import sys, time
from pathlib import Path
from bessemer.run_tasks.time_limit import is_left_out, limited
def documents():
    for number in range(6):
        if number in (2, 4) and not is_left_out():
            sum(range(10 ** 12))  # the interpreter's lock is held
        yield number
for number in limited(documents(), Path(sys.argv[1]), 0.3):
    print(number, is_left_out())
"""


def test_a_slow_page_is_rejected_and_the_others_kept(
    data: Path, build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patched").mkdir()
    (tmp_path / "patched" / "sitecustomize.py").write_text(SLOW_PAGES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "patched"))
    for number in range(40):
        mark = "<!-- HANGS -->" if number == 7 else ""
        body = "".join(f"<p>{line}</p>" for line in prose(number, 300).split("\n"))
        (data / f"{number:02}.html").write_text(f"<html><body>{mark}<main>{body}</main></body></html>")
    # Unclosed markup takes quadratic time in mwparserfromhell: minutes for this page.
    (data / "wiki.xml").write_text(HEAD + page(1) + page(2, "&lt;b &lt;i " * 20_000) + page(3) + "</mediawiki>")
    plan = recipe(
        {"name": "s", "format": "html", "paths": [str(data)]},
        {"name": "w", "format": "mediawiki", "paths": [str(data)]},
    )
    plan = plan.model_copy(update={"corpus": plan.corpus.model_copy(update={"document_seconds": 2.0})})
    documents, rejected, statistics = build(plan)
    assert sorted(row["path"] for row in rejected) == ["data/07.html", "data/wiki.xml"]
    assert {row["reason"] for row in rejected} == {"too_slow"}
    assert len(documents) == 39 + 2
    assert statistics["totals"]["rejected"] == {"too_slow": 2}


def test_each_attempt_skips_one_more_document(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    shown = []
    for slow in (set(), {2}, {2, 4}):
        assert slow_documents(progress) == slow
        done = subprocess.run(
            [sys.executable, "-c", READER, str(progress)], capture_output=True, text=True, check=False
        )
        shown.append((done.returncode, done.stdout.split("\n")[:-1]))
    assert [code for code, _ in shown] == [1, 1, 0]
    assert shown[2][1] == [f"{number} {number in (2, 4)}" for number in range(6)]
    assert slow_documents(None) == slow_documents(tmp_path / "none") == set()
