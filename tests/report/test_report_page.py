"""The page of a plan: complete, self-contained, safe, and without empty sections."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bessemer.common.errors import InputError
from bessemer.plan import figures, plan_request, plan_result
from bessemer.plan.figures import figure_series, memory_bars
from bessemer.plan.goal import goal_of
from bessemer.plan.plan_result import PlanResult
from bessemer.report import page, plan_page
from bessemer.report.template import PAGE_MARK, write_page
from bessemer.run.directory import RunDirectory
from bessemer.run.files import require_output_path, write_json
from tests.report.conftest import MakeRun, Reader

pytest.importorskip("jinja2")
pytest.importorskip("plotly")


SECTIONS = ["facts", "memory", "step", "layouts"]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} ' \""


@cache
def made(**asked: str) -> PlanResult:
    found = plan_request.from_options(asked)
    goal = goal_of(found.recipe, found.recipe.model.vocabulary or 32_000, model=found.model)
    return plan_result.make_plan(goal, searched=True)


def plan() -> PlanResult:
    return made(
        model="llama3-8b", tokens="1T", gpus="16xH100", pp="2", micro_batch="1",
        **{"parallel.virtual": "2", "parallel.schedule": "interleaved"},
    )  # fmt: skip


@cache
def whole(name: str = "llama3-8b") -> Reader:
    out = plan()
    return Reader(plan_page.render(out, name=name))


def test_every_section_is_present_in_order() -> None:
    found = whole()
    found.is_whole(SECTIONS)
    assert set(found.figures()) == {"layouts"}
    said = " ".join(" ".join(found.text).split())
    assert f"{plan().memory.total / 1e9:.1f} GB" in said and "16 x H100 SXM" in said


def test_hostile_names_are_escaped() -> None:
    found = whole(HOSTILE)
    assert HOSTILE in "".join(found.text)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert len(found.scripts) == len(whole().scripts) == 3


@pytest.mark.parametrize("missing", [("memory",), ("step",), ("layouts",), ("memory", "step", "layouts")])
def test_missing_parts_are_left_out(missing: tuple[str, ...]) -> None:
    found = Reader(plan_page.compose("part", {**figure_series(plan()), **dict.fromkeys(missing)})).sections()
    assert set(found) == {"memory", "step", "layouts"} - set(missing)


def test_bar_lengths_equal_their_sums() -> None:
    out = plan()
    html = plan_page.compose("bars", figure_series(out))
    edge = float(re.findall(r'class="edge" style="left:([0-9.]+)%', html)[0])
    lanes = re.findall(r'<span class="lane">(.*?)</span>', html, re.DOTALL)
    bars = [bar for group in memory_bars(out.job)["groups"] for bar in group["bars"]]
    for lane, bar in zip(lanes, bars, strict=True):
        width = sum(map(float, re.findall(r"width:([0-9.]+)%", lane)))
        assert width == pytest.approx(edge * bar["total"] / out.job.cluster.device.memory, abs=0.02)
    stack = re.findall(r'<div class="stack".*?</div>', html, re.DOTALL)[0]
    assert sum(map(float, re.findall(r"width:([0-9.]+)%", stack))) == pytest.approx(100.0, abs=0.1)


def test_every_colour_is_from_the_theme() -> None:
    style = (Path(page.__file__).parent / "style.css").read_text()
    known = set(re.findall(r"--([a-z0-9-]+):", style))
    html = plan_page.compose("colours", figure_series(plan()))
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", html)) <= known
    inks = {trace["ink"] for figure in Reader(html).figures().values() for trace in figure["traces"]}
    assert inks <= known


def test_a_page_is_written_or_its_folder_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert require_output_path(page, "--html", PAGE_MARK) == page
    write_page(page, plan_page.render(plan(), name="plan"))
    assert require_output_path(page, "--html", PAGE_MARK) == page
    with pytest.raises(InputError, match="--html: .*none"):
        require_output_path(tmp_path / "none" / "plan.html", "--html", PAGE_MARK)
    with pytest.raises(InputError, match="--html"):
        require_output_path(tmp_path, "--html", PAGE_MARK)
    page.write_text("<title>A page of mine</title>")
    with pytest.raises(InputError, match="--html"):
        require_output_path(page, "--html", PAGE_MARK)


def searched() -> PlanResult:
    """Return a plan with a searched layout."""
    return made(model="llama3-8b", tokens="1T", gpus="16xH100")


@pytest.mark.parametrize("of", [searched, plan])
def test_memory_bars_add_up_and_mark_the_plan(of: Callable[[], PlanResult]) -> None:
    out = of()
    found = figures.memory_bars(out.job)
    assert found["capacity"] == out.job.cluster.device.memory
    for group in found["groups"]:
        for bar in group["bars"]:
            assert sum(bar["parts"].values()) == bar["total"], bar["name"]
            assert bar["fits"] == (bar["total"] <= found["capacity"])
        assert [bar["total"] for bar in group["bars"] if bar["own"]] == [out.memory.total]
    kinds = [group["kind"] for group in found["groups"]]
    assert kinds[:2] == ["ZeRO stage", "recompute"]
    assert ("pipeline stage" in kinds) == (out.job.layout.pipeline > 1)


def test_the_pareto_front_has_the_layouts_that_no_other_beats() -> None:
    out = searched()
    assert out.found is not None
    found = figures.layouts(out.found, out.job)
    every = [(one.step.tokens_per_second / 16, one.memory.total) for one in out.found.ranked]
    assert found["fitting"] == len(every) >= len(found["rows"]) >= 300
    for row in found["rows"]:
        speed, held = row["tokens_per_second_per_device"], row["memory"]
        beaten = any(fast >= speed and less <= held and (fast, less) != (speed, held) for fast, less in every)
        assert beaten != row["front"] or every.count((speed, held)) > 1
    assert [row["tokens_per_second_per_device"] for row in found["rows"] if row["own"]] == [
        pytest.approx(out.step.tokens_per_second / 16)
    ]


def test_all_figures_are_plain_values() -> None:
    for out in (searched(), plan()):
        found = figures.figure_series(out)
        assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
        assert sum(found["step"]["parts"].values()) == pytest.approx(out.step.seconds)


REPORT_SECTIONS = "story curves plan samples corpus data incidents export stages environment recipe".split()  # noqa: SIM905
HOSTILE_TEXT = (
    "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)><!-- <script> {{ 7 * 7 }} \u2028 \u202e '\""
)


def read(run: RunDirectory) -> Reader:
    return Reader(page.write(run).read_text(encoding="utf-8"))


def test_every_section_of_a_report_is_present_in_order(make_run: MakeRun) -> None:
    read(make_run(steps=60)).is_whole(REPORT_SECTIONS)
    style = (Path(page.__file__).parent / "style.css").read_text()
    assert "url(" not in style and "@import" not in style


def test_sections_without_data_are_absent(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    for path in [*run.path.rglob("*.json"), run.metrics, run.incidents, run.recipe]:
        if path.parent != run.corpus:
            path.unlink()
    found = read(run)
    assert found.sections() == ["corpus"]
    assert "12,649 of 14,874 documents were kept" in "".join(found.text)


def test_a_page_without_curves_has_no_plotting_library(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_json(run.path / "stages.json", {"stages": [{"name": "corpus", "seconds": 3.0, "skipped": False}]})
    assert page.write(run).stat().st_size < 100_000


def test_hostile_text_is_escaped(make_run: MakeRun) -> None:
    run = make_run(steps=20, hostile=HOSTILE_TEXT)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows:
        for key in ("loss_by_source", "bits_per_byte_by_source"):
            if key in row:
                row[key][HOSTILE_TEXT] = 3.0  # inside the figures, which are in a script element
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(run)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in "".join(found.text)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert "{{ 7 * 7 }}" in "".join(found.text)
    assert len(found.scripts) == 3
    data = found.scripts[1]
    assert "<" not in data
    assert any("</script>" in trace["name"] for trace in json.loads(data)["sources"]["traces"])


def test_half_a_surrogate_pair_is_no_error(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    run.evaluation.write_text('{"samples": [{"prompt": "x", "text": "torn \\ud83d here"}]}')
    assert "torn ? here" in page.write(run).read_text(encoding="utf-8")


def test_the_page_is_written_atomically(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(steps=10)
    run.report.write_text("the old page")

    def fails(*arguments: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(OSError, match="disk full"):
            page.write(run)
    assert run.report.read_text() == "the old page"
    assert page.write(run) == run.report
    assert run.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(run.path.glob(".*"))
