"""Sections of the page: the corpus, its quality, the processes, and the results of an encoder and a classifier."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.report import corpus, curves, data, page, sections, summary
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from tests.report.conftest import MakeRun, plain, section_of, tables, valid_plotly


def small_statistics() -> dict[str, object]:
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
def built(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.corpus.mkdir(parents=True)
    write_json(made.corpus / "statistics.json", small_statistics())
    write_json(made.path / "stages.json", {"stages": [{"name": "corpus", "seconds": 61.0, "skipped": False}]})
    return made


def corpus_section(run: RunDirectory) -> str:
    return section_of(page.render(data.read(run)), "corpus")


def test_tables_of_the_corpus_section(built: RunDirectory) -> None:
    html = corpus_section(built)
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


def test_files_that_were_not_read_are_on_the_page(built: RunDirectory) -> None:
    given: Any = small_statistics()
    given["sources"][0]["not_read"] = {".pdf": {"files": 1200, "bytes": 5_000_000, "example": "a/<b>.pdf"}}
    write_json(built.corpus / "statistics.json", given)
    html = page.render(data.read(built))
    for shown in ("Files not read", ".pdf", "1,200", "5.0 MB", "a/&lt;b&gt;.pdf"):
        assert shown in html
    write_json(built.corpus / "statistics.json", small_statistics())
    assert "Files not read" not in page.render(data.read(built))


def test_the_corpus_section_escapes_text(built: RunDirectory) -> None:
    section = corpus_section(built)
    assert "Built in 1 min 01 s" in section
    assert "<b>bad</b>" not in section
    lengths = section[section.index("Length, kept and rejected") :]
    assert lengths[: lengths.index("</table>")].count("<i ") == 2  # no bar for a count of 0
    assert "&lt;b&gt;bad&lt;/b&gt;" in section


def record(hostile: str = "") -> dict[str, Any]:
    """Return quality.json as the corpus writes it, for three sources."""
    return {
        "version": 2,
        "model": {"kind": "linear", "read_bytes": 20_000, "buckets": 262_144},
        "labelled": {"high": {"docs": 1173}, "low": {"code": 7574}, "train": 1800, "test": 226,
                     "duplicates_left_out": 31},
        "held_out": {"documents": 226, "high": 113, "accuracy": 0.947, "precision": 0.94, "recall": 0.956, "f1": 0.948,
                     "roc_auc": 0.987, "log_loss": 0.151, "brier": 0.041},
        "scores": {"code": [900, *[20] * 18, 5], "docs": [3] * 19 + [800], "notes": [10] * 20},
        "use": {"kind": "filter", "limit": "threshold 0.3", "threshold": 0.3, "sources": [
            {"source": "code", "judged": True, "documents": 1265, "kept": 245, "mean_score": 0.11},
            {"source": "docs", "judged": False, "documents": 857, "kept": 857, "mean_score": 0.95}]},
        "examples": [{"identity": f"{place:032x}", "source": "code", "score": place / 60, "excerpt": f"text {place}{hostile}"}
                     for place in range(60)],
        "seconds": {"score": 1.0},
    }  # fmt: skip


def test_the_quality_section_is_present_if_its_file_is(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    before = page.write(run).read_text(encoding="utf-8")
    assert 'id="quality"' not in before
    write_json(run.corpus / "quality.json", record("</script><script>alert(1)</script>"))
    html = page.write(run).read_text(encoding="utf-8")
    for said in (
        "94.7% of 226 held-out documents are on the right side of 0.5, ROC AUC 0.987.",
        "High is docs, low is code: 1,800 documents to learn from, 226 to test; 31 copies left out.",
        "Documents below 0.300 were rejected.",
        'data-figure="scores"',
    ):
        assert said in html, said
    assert html.count("<script") == before.count("<script") and "&lt;/script&gt;" in html


def test_examples_and_figure_of_the_scores(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    write_json(run.corpus / "quality.json", record())
    groups = corpus.scored_examples(data.read(run))
    assert [f"{score:.3f}" for score, _ in groups["scored lowest"]] == ["0.000", "0.017", "0.033", "0.050"]
    assert groups["scored highest"][0][1]["excerpt"] == "text 59"
    near = [score for score, _ in groups["nearest to the limit"]]
    assert len(near) == 8 and near == sorted(near) and max(abs(score - 0.3) for score in near) < 0.07
    figure = corpus.score_histogram(data.read(run))
    assert figure is not None
    valid_plotly(figure)
    code = next(trace for trace in figure["traces"] if trace["name"] == "code")
    assert code["y"][0] == pytest.approx(900 / 1265, abs=1e-6) and sum(code["y"]) == pytest.approx(1, abs=1e-4)
    assert figure["shapes"][0]["x0"] == 0.3


def test_an_untested_quality_model_is_reported(make_run: MakeRun) -> None:
    run, untested = make_run(steps=10), record()
    for key in ("held_out", "labelled"):
        del untested[key]
    write_json(run.corpus / "quality.json", untested)
    assert "The model was not tested here" in page.write(run).read_text(encoding="utf-8")


HOSTILE = "</code><script>alert(1)</script>"


def turned(run: RunDirectory, objective: str, evaluation: dict[str, object]) -> data.RunData:
    """Change a run directory to that of another objective."""
    run.recipe.write_text(run.recipe.read_text().replace("[train]\n", f'[train]\nobjective = "{objective}"\n'))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "validation":
            del line["bits_per_byte"], line["bits_per_byte_by_source"]
            line |= {"accuracy": line["step"] / 2000, "accuracy_by_source": {"code": 0.5}}
        elif objective == "classify":
            line["accuracy"] = line["step"] / 1500
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = {"step": 1200, "objective": objective, "loss": 2.5, "bits_per_byte": None, "accuracy": 0.625, "ngram": None,
            "samples": [], "tokens": 800}  # fmt: skip
    write_json(run.evaluation, {**base, **evaluation})
    return data.read(run)


def shown_text(run: RunDirectory) -> str:
    return re.sub(r"<script>.*?</script>", "", page.render(data.read(run)), flags=re.DOTALL)


def test_the_results_of_an_encoder(make_run: MakeRun) -> None:
    run = make_run()
    found = turned(run, "masked", {})
    assert found.loss_unit == "nats per hidden token"
    assert "encoder" in summary.headline(found) and "guesses 62.5% of the tokens hidden" in summary.headline(found)
    assert summary.tiles(found)[0] == ("Hidden tokens guessed right", "62.5%", "loss 2.500 nats per hidden token")
    assert "from 5.00% to 60.00% over 12 validations; the best at step 1,200." in summary.curve_finding(found)
    drawn = {figure["id"]: figure for figure in curves.curves(found)}
    assert "bits" not in drawn and "sources" in drawn
    assert drawn["accuracy"]["traces"][-1]["y"][-1] == 60.0
    assert "Bits per byte" not in shown_text(run)


def test_the_results_of_a_classifier(make_run: MakeRun) -> None:
    run = make_run()
    classes = [
        {"label": "spam" + HOSTILE, "texts": 4, "precision": 0.75, "recall": 0.75, "f1": 0.75},
        {"label": "ham", "texts": 0, "precision": None, "recall": None, "f1": 0.0},
    ]
    found = turned(run, "classify", {"classes": classes, "confusion": [[3, 1], [0, 0]]})
    assert "classifier" in summary.headline(found) and "puts 62.5% of the held-out texts" in summary.headline(found)
    html = section_of(page.render(found), "classes")
    assert [row[2] for row in tables(html)[""]] == ["75.0%", "–"]
    assert [row[1:] for row in tables(html)["What each was taken for"]] == [["3", "1"], ["0", "0"]]
    assert re.findall(r"accent\) (\d+)%", html) == ["45", "15"]
    drawn = {figure["id"]: figure for figure in curves.curves(found)}
    assert [trace["name"] for trace in drawn["accuracy"]["traces"]] == ["train, smoothed", "held out"]
    text = shown_text(run)
    assert "<h2>Classes</h2>" in text and "<script>alert" not in text


def split(run: RunDirectory, steps: int = 3) -> RunDirectory:
    """Change a run to a parallel one, with the seconds of the matmul check in a few steps."""
    recipe = run.recipe.read_text()
    run.recipe.write_text(recipe + "\n[parallel]\nreplicate = 1\nshard = 2\ntensor = 2\npipeline = 2\nzero = 1\n")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()][:steps]
    for index, line in enumerate(lines[:]):
        lines.append({"kind": "ranks", "step": line["step"], "matmul_seconds": {"0": 0.001, "1": 0.002 + index / 1000}})
    run.metrics.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return run


def test_layout_and_times_are_shown(make_run: MakeRun) -> None:
    html = section_of(page.render(data.read(split(make_run(steps=40)))), "processes")
    assert "8 processes: shard 2 x tensor 2 x pipeline 2." in plain(html)
    shown = tables(html)
    assert [row[:2] for row in shown[""]] == [
        ["shard", "2"], ["tensor", "2"], ["pipeline", "2"], ["zero", "1"], ["schedule", "1f1b"],
    ]  # fmt: skip
    assert [row[0] for row in shown["The same matmul on every rank"]] == ["1", "0"]


def test_damaged_parts_are_left_out(make_run: MakeRun) -> None:
    run = make_run()
    values = '{"scores": 3}', '{"scores": {"code": [null, "x"]}, "use": [], "held_out": 7, "examples": [1]}', "{", "[]"
    for damage in values:
        (run.corpus / "quality.json").write_text(damage)
        html = page.write(run).read_text(encoding="utf-8")
        assert ("corpus/quality.json is damaged" in html) == (damage in ("{", "[]"))
    read = data.read(run)
    for layout in (None, "8", {"shard": "two"}, {"shard": -1}):
        read.recipe["parallel"] = layout
        assert sections.layout_sizes(read) == {}
    found = turned(run, "classify", {"classes": [{"label": 3}, "x"], "confusion": ["x", [1]]})
    assert len(tables(section_of(page.render(found), "classes"))) == 1
