"""The page of a plan: whole, self-contained, safe, and what is missing left out."""

import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.common.errors import InputError
from bessemer.plan import plan_request, plan_result
from bessemer.plan.figures import figure_series, memory_bars
from bessemer.plan.goal import goal_of
from bessemer.plan.plan_result import PlanResult
from bessemer.report import page, plan_page
from bessemer.report.template import PAGE_MARK, write_page
from bessemer.run.files import require_output_path
from tests.report.conftest import Reader

SECTIONS = ["facts", "what-if", "memory", "step", "layouts"]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} ' \""


@cache
def made(**asked: str) -> PlanResult:
    found = plan_request.from_options(asked)
    goal = goal_of(found.recipe, found.recipe.model.vocabulary or 32_000, model=found.model)
    return plan_result.make_plan(goal, searched=True)


def plan() -> PlanResult:
    return made(
        model="llama3-8b", tokens="1T", gpus="16xH100", pp="2", virtual="2", schedule="interleaved", micro_batch="1"
    )


@cache
def whole(name: str = "llama3-8b") -> Reader:
    out = plan()
    return Reader(plan_page.render(out, name=name, beside=[out], titles=[name]))


def test_every_section_is_there_in_order() -> None:
    found = whole()
    found.is_whole(SECTIONS)
    assert set(found.figures()) == {"layouts"}
    said = " ".join(" ".join(found.text).split())
    assert f"{plan().memory.total / 1e9:.1f} GB" in said and "16 x H100 SXM" in said


def test_hostile_names_stay_text() -> None:
    found = whole(HOSTILE)
    assert HOSTILE in "".join(found.text)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert len(found.scripts) == len(whole().scripts) == 3


@pytest.mark.parametrize("missing", [("memory",), ("step",), ("layouts",), ("memory", "step", "layouts")])
def test_what_is_missing_is_left_out(missing: tuple[str, ...]) -> None:
    found = Reader(plan_page.compose("part", {**figure_series(plan()), **dict.fromkeys(missing)})).sections()
    assert set(found) == {"memory", "step", "layouts"} - set(missing)


def test_bars_are_as_long_as_their_sums() -> None:
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


def test_every_colour_is_one_of_the_theme() -> None:
    style = (Path(page.__file__).parent / "style.css").read_text()
    known = set(re.findall(r"--([a-z0-9-]+):", style))
    html = plan_page.compose("colours", figure_series(plan()))
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", html)) <= known
    inks = {trace["ink"] for figure in Reader(html).figures().values() for trace in figure["traces"]}
    assert inks <= known


def test_a_page_is_written_where_it_can_be(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert require_output_path(page, "--html", PAGE_MARK) == page
    write_page(page, plan_page.render(plan(), name="plan"))
    assert require_output_path(page, "--html", PAGE_MARK) == page
    with pytest.raises(InputError, match="no such folder"):
        require_output_path(tmp_path / "none" / "plan.html", "--html", PAGE_MARK)
    with pytest.raises(InputError, match="is a folder"):
        require_output_path(tmp_path, "--html", PAGE_MARK)
    page.write_text("<title>A page of mine</title>")
    with pytest.raises(InputError, match="none of Bessemer's files"):
        require_output_path(page, "--html", PAGE_MARK)
