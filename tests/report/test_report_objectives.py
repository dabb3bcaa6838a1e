"""The report of an encoder and of a classifier: no bits per byte, hidden words and classes instead."""

import json
import re
from collections.abc import Callable

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.report import curves, data, page, summary
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from tests.report.conftest import plain as text_of
from tests.report.conftest import section_of, tables

HOSTILE = "</code><script>alert(1)</script>"


def turned(run: RunDirectory, objective: str, evaluation: dict[str, object]) -> data.RunData:
    """A run's folder as another objective would have written it."""
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


def plain(run: RunDirectory) -> str:
    return re.sub(r"<script>.*?</script>", "", page.render(data.read(run)), flags=re.DOTALL)


def test_an_encoder(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run()
    guesses = [{"word": "get" + HOSTILE, "probability": 0.5}, {"word": "set", "probability": 0.25}]
    fill_in = {"source": "code", "before": "self.", "word": "get" + HOSTILE, "after": "(key)", "guesses": guesses}
    found = turned(run, "masked", {"fill_ins": [fill_in, {**fill_in, "word": "pop"}]})
    assert found.loss_unit == "nats per hidden token"
    assert "encoder" in summary.headline(found) and "guesses 62.5% of the tokens hidden" in summary.headline(found)
    assert summary.tiles(found)[0] == ("Hidden tokens guessed right", "62.5%", "loss 2.500 nats per hidden token")
    assert "from 5.00% to 60.00% over 12 validations; the best at step 1,200." in summary.curve_finding(found)
    filled_in = section_of(page.render(found), "fill_ins")
    captions = [text_of(one) for one in re.findall(r"<figcaption.*?</figcaption>", filled_in)]
    assert [caption.partition(":")[0] for caption in captions] == ["code · right", "code · wrong"]
    drawn = {figure["id"]: figure for figure in curves.curves(found)}
    assert "bits" not in drawn and "sources" in drawn
    assert drawn["accuracy"]["traces"][-1]["y"][-1] == 60.0
    shown = plain(run)
    assert "<h2>Filled in</h2>" in shown and "Bits per byte" not in shown
    assert "<script>alert" not in shown


def test_a_classifier(make_run: Callable[..., RunDirectory]) -> None:
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
    text = plain(run)
    assert "<h2>Classes</h2>" in text and "<script>alert" not in text


def test_damaged_classes_are_no_failure(make_run: Callable[..., RunDirectory]) -> None:
    found = turned(make_run(), "classify", {"classes": [{"label": 3}, "x"], "confusion": ["x", [1]]})
    html = page.render(found)
    assert len(tables(section_of(html, "classes"))) == 1
    assert section_of(html, "fill_ins") == ""
