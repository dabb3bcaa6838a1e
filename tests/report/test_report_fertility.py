from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.report import data as run_data
from bessemer.report import page
from bessemer.report.corpus import MAX_FERTILITY_ROWS, fertility
from bessemer.run import RunFolder, read_json, write_json
from bessemer.tokens.encode import SEPARATOR, fertility_table
from tests.report.conftest import plain, section_of, tables


def tally(languages: int = 1) -> dict[str, list[int]]:
    return {
        f"web{SEPARATOR}{'' if languages == 1 else f'l{n:03d}'}": [2, 1000 + n, 100, 250, 200, 25, 100]
        for n in range(languages)
    }


def test_rows_of_each_tokenizer(make_run: Callable[..., RunFolder]) -> None:
    found = run_data.read(make_run())
    assert fertility(found) == {}  # a manifest without it

    def shown(manifest: dict[str, Any]) -> str:
        return section_of(page.render(replace(found, manifest={"fertility": manifest})), "data")

    html = shown(fertility_table(tally(), ["this run", "<other>"], [400, 50257]))
    assert "A token stands for 4.00 bytes of this text: −20.0% against <other>." in plain(html)
    assert tables(html)["Fertility"][0][-6:] == ["4.00", "2.50", "10.0%", "5.00", "2.00", "50.0%"]
    assert "Language" not in html
    html = shown(fertility_table(tally(70), ["a", "b"], [1, 2]))
    assert len(tables(html)["Fertility"]) == MAX_FERTILITY_ROWS + 1
    assert '<p class="note">10 more rows' in html
    assert tables(html)["Fertility"][0][1] == "l010"  # the largest are shown, in their order
    for damaged in ({"rows": [{"source": 3, "tokens": "x"}]}, {"rows": "x"}, []):
        shown(damaged)  # type: ignore[arg-type]


def test_it_stands_on_the_page(make_run: Callable[..., RunFolder]) -> None:
    run = make_run()
    path = run.tokens / "manifest.json"
    write_json(
        path, {**read_json(path), "fertility": fertility_table(tally(2), ["this run", "<b>other</b>"], [400, 50257])}
    )
    text = page.write(run).read_text(encoding="utf-8")
    assert "Fertility" in text and "&lt;b&gt;other&lt;/b&gt;, 50,257 ids" in text and "<b>other</b>" not in text
