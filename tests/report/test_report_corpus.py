"""The Corpus section's parts, from statistics as the pipeline writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.report import page
from bessemer.report.data import read
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from tests.report.conftest import section_of, tables


def statistics() -> dict[str, object]:
    def source(name: str, kept: int, reasons: dict[str, int]) -> dict[str, object]:
        rejected = {
            reason: {
                "documents": count,
                "bytes": 10 * count,
                "examples": [
                    {"identity": "", "path": f"{name}/{reason}-{number}", "excerpt": "<b>bad</b>", "detail": "why"}
                    for number in range(min(count, 4))
                ],
            }
            for reason, count in reasons.items()
        }
        came = kept + sum(reasons.values())
        return {
            "source": name,
            "format": "text",
            "files": came,
            "documents_in": came,
            "documents_kept": kept,
            "steps": [
                {"step": "read", "documents_in": came, "rejected": 0},
                {"step": "rules", "documents_in": came, "rejected": came - kept},
            ],
            "rejected": rejected,
            "length_histogram": [{"from_characters": 256, "documents": kept}],
            "length_histogram_rejected": [{"from_characters": 64, "documents": came - kept}],
        }

    sources = [source("a", 6, {"too_short": 3, "not_text": 1}), source("b", 2, {"too_short": 2})]
    return {
        "sources": sources,
        "totals": {
            "documents_in": 14,
            "documents_kept": 8,
            "rejected": {"too_short": 5, "not_text": 1},
            "languages": {f"l{number:02d}": 100 - number for number in range(20)},
            "tables": {"personal_data": {"email": 7, "phone": 2, "iban": 0}, "odd": {"x": 1}},
        },
        "duplicates": {
            "clusters": [
                {"documents": 2, "clusters": 5},
                {"documents": 3, "clusters": 1},
                {"documents": 9, "clusters": 2},
            ],
            "jaccard": [{"from": round(0.025 * n, 3), "documents": {32: 2, 39: 7}.get(n, 0)} for n in range(40)],
            "jaccard_is": "verified",
        },
        "contamination": [
            {"name": "quiz", "items": 1200, "searched": 1100, "items_touched": 11, "documents": 7, "share": 0.01}
        ],
        "lines": {"documents": 8, "edited": 3, "spans": 4, "removed_characters": 5678, "emptied": 0},
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.corpus.mkdir(parents=True)
    write_json(made.corpus / "statistics.json", statistics())
    write_json(made.path / "stages.json", {"stages": [{"name": "corpus", "seconds": 61.0, "skipped": False}]})
    return made


def corpus_section(run: RunDirectory) -> str:
    return section_of(page.render(read(run)), "corpus")


def test_tables(run: RunDirectory) -> None:
    html = corpus_section(run)
    shown = tables(html)
    assert [row[:3] for row in shown["Step by step"]] == [["read", "14", "0"], ["rules", "14", "6"]]
    steps = html[html.index("Step by step") :]
    widths = re.findall(r"width:([0-9.]+)%", steps[: steps.index("</table>")])[1:]
    assert sum(map(float, widths)) == pytest.approx(100)
    languages = html[html.index("Languages of the kept documents") :]
    assert shown["Languages of the kept documents"][0][:2] == ["l00", "100"]
    assert f"width:{100 * 100 / 676:.3f}%" in languages
    assert shown["Languages of the kept documents"][-1][:2] == ["8 more", f"{sum(100 - n for n in range(12, 20))}"]
    assert [row[0] for row in shown["Personal data found"]] == ["email", "phone"]
    assert [row[0] for row in shown["Odd"]] == ["x"]
    clusters = shown["Groups of duplicates, by size"]
    assert [row[:2] for row in clusters] == [["2 to 3 documents", "6"], ["8 to 15 documents", "2"]]
    assert shown["Near duplicates, by their verified Jaccard to the document that stays"] == [
        ["0.8 to 0.825", "2", ""], ["0.975 to 1", "7", ""],
    ]  # fmt: skip
    assert shown["Evaluation sets found in the corpus"] == [["quiz", "1,200", "1,100", "11", "1.0%", "7"]]
    assert shown["Cut out of the kept documents"] == [["repeated lines", "3", "4", "5,678"]]
    lengths = [(row[0], row[1], row[3]) for row in shown["Length, kept and rejected"]]
    assert lengths == [("64", "0", "6"), ("128", "0", "0"), ("256", "8", "0")]


def test_files_that_were_not_read_are_on_the_page(run: RunDirectory) -> None:
    given: Any = statistics()
    given["sources"][0]["not_read"] = {".pdf": {"files": 1200, "bytes": 5_000_000, "example": "a/<b>.pdf"}}
    write_json(run.corpus / "statistics.json", given)
    html = page.render(read(run))
    for shown in ("Files not read", ".pdf", "1,200", "5.0 MB", "a/&lt;b&gt;.pdf"):
        assert shown in html
    write_json(run.corpus / "statistics.json", statistics())
    assert "Files not read" not in page.render(read(run))


def test_the_page_shows_them_escaped(run: RunDirectory) -> None:
    section = corpus_section(run)
    assert "Built in 1 min 01 s" in section
    assert "<b>bad</b>" not in section
    lengths = section[section.index("Length, kept and rejected") :]
    assert lengths[: lengths.index("</table>")].count("<i ") == 2  # no bar for a count of 0
    assert "&lt;b&gt;bad&lt;/b&gt;" in section
