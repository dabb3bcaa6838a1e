from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.report import data as run_data
from bessemer.report import page
from bessemer.report.tokens import SHOWN_FERTILITY, fertility
from bessemer.run import RunFolder, read_json, write_json
from bessemer.tokens.encode import SEPARATOR, fertility_table
from tests.report.conftest import blocks, rows


def tally(languages: int = 1) -> dict[str, list[int]]:
    return {
        f"web{SEPARATOR}{'' if languages == 1 else f'l{n:03d}'}": [2, 1000 + n, 100, 250, 200, 25, 100]
        for n in range(languages)
    }


def test_rows_of_each_tokenizer(make_run: Callable[..., RunFolder]) -> None:
    found = run_data.read(make_run())
    assert fertility(found) == []  # a manifest without it
    shown = fertility(
        replace(found, manifest={"fertility": fertility_table(tally(), ["this run", "<other>"], [400, 50257])})
    )
    assert shown[1]["text"] == "A token stands for 4.00 bytes of this text: −20.0% against <other>."
    assert rows(shown)[0][-6:] == ["4.00", "2.50", "10.0%", "5.00", "2.00", "50.0%"]
    assert "Language" not in [column["text"] for column in blocks(shown, "table")[0]["columns"]]
    many = fertility(replace(found, manifest={"fertility": fertility_table(tally(70), ["a", "b"], [1, 2])}))
    assert len(rows(many)) == SHOWN_FERTILITY + 1
    assert blocks(many, "note")[0]["text"].startswith("10 more rows")
    assert rows(many)[0][1] == "l010"  # the largest are shown, in their order
    for damaged in ({"rows": [{"source": 3, "tokens": "x"}]}, {"rows": "x"}, []):
        fertility(replace(found, manifest={"fertility": damaged}))


def test_it_stands_on_the_page(make_run: Callable[..., RunFolder]) -> None:
    run = make_run()
    path = run.tokens / "manifest.json"
    write_json(
        path, {**read_json(path), "fertility": fertility_table(tally(2), ["this run", "<b>other</b>"], [400, 50257])}
    )
    text = page.write(run).read_text(encoding="utf-8")
    assert "Fertility" in text and "&lt;b&gt;other&lt;/b&gt;, 50,257 ids" in text and "<b>other</b>" not in text
