"""The studies on the common base, at sizes that take seconds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer import studies
from bessemer.cli import run_command
from bessemer.studies import data, pages, processes, variations
from bessemer.studies.base import MEASURES, Variation

ALL = {name: subject for name in studies.STUDIES if isinstance(subject := studies.load(name), Variation)}


def tiny(study: Variation, tokens: int = 8192, **base: Any) -> dict[str, Any]:
    return replace(study, tokens=tokens, base={**study.base, **base}).run()


def judged(study: Variation, results: dict[str, Any]) -> None:
    """Three sentences, a table and a figure follow from whatever came out, and all of it is JSON."""
    assert list(results["rows"]) == list(study.variants)
    assert len(study.shows(results)) == 3 and all(line.endswith(".") for line in study.shows(results))
    assert all(name in study.table(results) for name in study.variants)
    assert study.plot(results).startswith("<svg") and study.plot(results).endswith("</svg>")
    json.dumps(results, allow_nan=False)


def test_one_large_pass_and_eight_small_ones_give_the_same_losses() -> None:
    results = tiny(variations.accumulation, 24_576)
    whole, parts = results["rows"].values()
    assert whole["losses"] == pytest.approx(parts["losses"], abs=1e-5)
    assert (whole["passes"], parts["passes"]) == (3, 24)
    assert parts["memory_bytes"] < whole["memory_bytes"] / 2
    judged(variations.accumulation, results)


def test_recompute_changes_no_bit_and_saves_memory() -> None:
    results = tiny(variations.recompute, 12_288)
    rows = results["rows"]
    assert len({row["weights"] for row in rows.values()}) == 1
    assert rows["full"]["memory_bytes"] < rows["none"]["memory_bytes"]
    judged(variations.recompute, results)


def test_a_resumed_training_has_the_same_bits_and_one_without_its_optimizer_has_not() -> None:
    results = tiny(variations.resume, 10_240)
    rows = results["rows"]
    assert rows["never stopped"]["weights"] == rows["resumed"]["weights"]
    assert rows["never stopped"]["losses"] == rows["resumed"]["losses"]
    for other in ("no optimizer state", "data from its start"):
        assert rows[other]["weights"] != rows["resumed"]["weights"]
        assert rows[other]["losses"][:5] == rows["resumed"]["losses"][:5]
    judged(variations.resume, results)


def test_packed_sequences_have_more_targets_than_padded_ones() -> None:
    results = tiny(data.packing, 10_240)
    padded, packed = results["rows"].values()
    assert padded["real_share"] < 0.9 and packed["real_share"] > 0.95
    assert packed["text_bytes"] > padded["text_bytes"]
    judged(data.packing, results)


def test_the_grid_has_the_trained_loss_in_its_middle_and_leaves_the_weights() -> None:
    study = replace(
        variations.loss_surface, variants={"at initialisation": {"steps": 0, "edge": 3}, "trained": {"edge": 3}}
    )
    results = tiny(study, 8192)
    row = results["rows"]["trained"]
    assert row["grid"][1][1] == row["center"] < results["rows"]["at initialisation"]["center"]
    assert row["grid"][0][1] != row["center"]
    judged(study, results)


def test_damaged_lines_have_the_same_bytes() -> None:
    damaged = data._damaged(5000)
    whole = data.text.training_and_held_out(data.MAX_BYTES)[0][-5000:]
    assert bytes(damaged) != bytes(whole)
    assert [sorted(line) for line in bytes(damaged).split(b"\n")] == [
        sorted(line) for line in bytes(whole).split(b"\n")
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["batch-size", "rate-scaling", "warmup", "clipping", "duplicates", "quality", "mixture"]
)
def test_every_variation_runs(name: str) -> None:
    judged(ALL[name], tiny(ALL[name]))


@pytest.mark.long
@pytest.mark.usefixtures("cold")  # how memory is returned is set for a process when it starts
def test_memory_at_rest_falls_with_sharding_and_the_peak_with_stage_3() -> None:
    """Stages 1 and 2: tests/train/test_step_bytes.py, by the formula; the losses of all: tests/parallel/test_data.py."""
    variants = {name: processes.zero.variants[name] for name in ("2 replicas", "ZeRO 3")}
    small = replace(
        processes.zero, variants=variants, base={**processes.zero.base, "train.steps": 5, "model.layers": 3}
    )
    results = small.run()
    rows = results["rows"]
    assert all(len(row["ranks"]) == 2 for row in rows.values())
    for key in ("weight_bytes", "gradient_bytes", "moment_bytes"):
        assert rows["ZeRO 3"][key] < 0.6 * rows["2 replicas"][key]
    assert rows["ZeRO 3"]["memory_bytes"] < rows["2 replicas"]["memory_bytes"]
    losses = [row["loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * 2, abs=1e-4)
    judged(small, results)


@pytest.mark.long
def test_the_efficiency_of_two_processes_is_compared_with_amdahls_law() -> None:
    variants = dict(list(processes.efficiency.variants.items())[:2])
    study = replace(processes.efficiency, variants=variants, base={**processes.efficiency.base, "train.steps": 6})
    results = study.run()
    for row in results["rows"].values():
        assert 0.5 < row["predicted"] <= 1 and row["efficiency"] > 0
    judged(study, results)


def test_a_run_that_diverges_says_at_which_step() -> None:
    study = replace(
        variations.clipping, variants={"wild": {variations.RATE: 50.0, variations.CLIP: 1e9}}, conclude=lambda rows: []
    )
    row = tiny(study)["rows"]["wild"]
    assert row["diverged_at"] is not None and row["diverged_at"] <= row["steps"] + 1


class Broken(Variation):
    def run(self) -> dict[str, Any]:
        raise RuntimeError("it <broke>")


def test_all_goes_on_after_a_study_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(
        variations.warmup,
        variants={"<one>": {}},
        tokens=2048,
        conclude=lambda rows: [f"<{len(rows)}> row.", "Two.", "Three."],
    )
    monkeypatch.setattr(variations, "small", small, raising=False)
    monkeypatch.setattr(variations, "broken", Broken("", {}, lambda rows: []), raising=False)
    some = {
        "broken": studies.Study("variations:broken", "Does it fail?"),
        "small": studies.Study("variations:small", "Does it <run>?"),
    }
    monkeypatch.setattr(studies, "STUDIES", some)
    monkeypatch.setattr(pages, "STUDIES", some)
    assert run_command(["study", "--all", "--folder", str(tmp_path / "pages")]) == 1
    assert "failed: broken; the rest is in" in capsys.readouterr().err
    index, page = (tmp_path / "pages" / "index.html").read_text(), (tmp_path / "pages" / "small.html").read_text()
    assert "it &lt;broke&gt;" in index and 'href="small.html"' in index and "&lt;1&gt; row." in index
    assert "Does it &lt;run&gt;?" in page and "&lt;one&gt;" in page
    for html in (index, page):
        assert "<svg" in html and "<noscript><svg" not in html and len(html) < 200_000
        assert "<run>" not in html and "<one>" not in html and "<broke>" not in html
    assert not (tmp_path / "pages" / "broken.html").exists()
    assert run_command(["study", "small", "--all"]) == 2


def test_every_study_says_what_is_expected_and_every_measure_is_used() -> None:
    for name in studies.STUDIES:
        assert studies.load(name).expected.endswith("."), name
    used = {measure for study in ALL.values() for measure in (*study.measures, study.plot_of)} - {"losses"}
    assert used == set(MEASURES)


def test_the_docs_list_every_study() -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|$", text, re.MULTILINE))
    assert rows == {name: study.what for name, study in studies.STUDIES.items()}
