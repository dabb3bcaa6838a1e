"""The page of a plan: whole, self-contained, safe, and what is missing left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.errors import InputError
from bessemer.plan import ask, here, outcome
from bessemer.plan.jobs import goal_of
from bessemer.plan.outcome import PlanResult
from bessemer.plan.pictures import loss_surface, memory_bars, pictures, timeline
from bessemer.recipe import load
from bessemer.report import page, plan_figures, plan_page
from bessemer.report.template import PAGE_MARK
from bessemer.run import RunFolder, read_json, writable, write_json
from tests.report.conftest import Reader

SECTIONS = ["facts", "what-if", "memory", "step", "pipeline", "layouts", "scaling", "saving", "assumptions"]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} ' \""


@cache
def made(**asked: str) -> PlanResult:
    found = ask.alone(asked)
    goal = goal_of(found.recipe, found.recipe.model.vocabulary or 32_000, model=found.model)
    return outcome.of(goal, searched=True)


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
    assert found.sections() == SECTIONS
    links = [attributes["href"] for tag, attributes in found.elements if tag == "a"]
    assert links == ["#top", *(f"#{name}" for name in SECTIONS)]
    figures = json.loads(next(text for text in found.scripts if text.startswith('{"layouts"')))
    places = [attributes["data-figure"] for _, attributes in found.elements if "data-figure" in attributes]
    assert sorted(places) == sorted(figures)
    assert set(figures) == {"surface", "checkpoints", "layouts"}
    assert sum(tag == "svg" for tag, _ in found.elements) == 1  # the diagram


def test_the_numbers_of_the_plan_stand_in_the_text() -> None:
    said, out = " ".join(" ".join(whole().text).split()), plan()
    assert f"{out.memory.total / 1e9:.1f} GB" in said
    assert f"MFU {out.step.mfu:.1%}" in said
    assert "16 x H100 SXM" in said
    # Each assumption is named with its source, the price with its date.
    device = out.job.cluster.device
    assert device.source in said
    assert out.bill.price_date is not None and f"asked on {out.bill.price_date}" in said
    assert "Besiroglu et al. 2024, table 1" in said and "Llama 3, H100: Grattafiori et al. 2024" in said


def test_the_page_loads_nothing() -> None:
    whole().loads_nothing()


def test_hostile_names_stay_text() -> None:
    found = whole(HOSTILE)
    assert HOSTILE in "".join(found.text)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert len(found.scripts) == len(whole().scripts) == 3


@pytest.mark.parametrize("missing", ["memory", "timeline", "pipeline", "surface", "checkpoints", "layouts"])
def test_what_is_missing_is_left_out(missing: str) -> None:
    drawn = {**pictures(plan()), missing: None}
    found = Reader(plan_page.compose("part", drawn)).sections()
    gone = {"timeline": "step", "checkpoints": "saving"}.get(missing, missing)
    assert gone not in found
    assert {"memory", "pipeline"} - {gone} <= set(found)


def test_a_page_of_nothing_is_still_a_page() -> None:
    assert Reader(plan_page.compose("empty", {})).sections() == []


def test_bars_end_where_their_sums_do() -> None:
    out = plan()
    capacity = out.job.cluster.device.memory
    raw = [bar for group in memory_bars(out.job)["groups"] for bar in group["bars"]]
    drawn = plan_figures.memory_bars(memory_bars(out.job))
    lanes = [row for _, lanes, _ in drawn["groups"] for row in lanes]
    for row, of in zip(lanes, raw, strict=True):
        _, left, width, _ = row["pieces"][-1]
        assert left + width <= 100.0 + 1e-9
        assert left + width == pytest.approx(100.0 if row["cut"] else drawn["edge"] * of["total"] / capacity)
    for row in plan_figures.step_lanes(timeline(out.step, out.job.layout)):
        assert sum(width for _, _, width, _ in row["pieces"]) == pytest.approx(100.0)


def test_every_part_of_a_step_has_a_colour_and_a_meaning() -> None:
    for name in pictures(plan())["timeline"]["parts"]:
        assert all(plan_figures.STEP_PARTS[name])


def test_every_colour_is_one_of_the_theme() -> None:
    style = (Path(page.__file__).parent / "style.css").read_text()
    known = set(re.findall(r"--([a-z0-9-]+):", style))
    html = plan_page.compose("colours", pictures(plan()))
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", html)) <= known
    figures = json.loads(next(text for text in Reader(html).scripts if text.startswith('{"')))
    inks = {trace["ink"] for figure in figures.values() for trace in figure["traces"]}
    assert inks <= known


def test_logarithmic_axes_have_few_round_ticks() -> None:
    for low, high in [(0.3, 12_000), (512, 8192), (3e8, 3e11), (1.5, 2.5e15)]:
        axis = plan_figures.log_axis("x", low, high)
        assert 2 <= len(axis["tickvals"]) <= 10
        assert all(low <= tick <= high for tick in axis["tickvals"])
        assert len(axis["tickvals"]) == len(axis["ticktext"])


def test_a_page_is_written_where_it_can_be(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert writable(page, "--html", PAGE_MARK) == page
    plan_page.write(page, plan(), name="plan")
    assert writable(page, "--html", PAGE_MARK) == page
    with pytest.raises(InputError, match="no such folder"):
        writable(tmp_path / "none" / "plan.html", "--html", PAGE_MARK)
    with pytest.raises(InputError, match="is a folder"):
        writable(tmp_path, "--html", PAGE_MARK)
    page.write_text("<title>A page of mine</title>")
    with pytest.raises(InputError, match="none of Bessemer's files"):
        writable(page, "--html", PAGE_MARK)


def test_the_same_plan_gives_the_same_page(tmp_path: Path) -> None:
    one = plan_page.write(tmp_path / "one.html", plan(), name="plan").read_bytes()
    assert plan_page.write(tmp_path / "two.html", plan(), name="plan").read_bytes() == one
    assert not list(tmp_path.glob(".*"))


def standing() -> dict[str, Any]:
    """What a plan.json has of it."""
    told = here.scaling(load("demo"), 1_377_664, 4096 * 1200)
    return {**told, **here.drawn({"parameters": 1_377_664, "tokens": 4096 * 1200, **told})}


def test_the_report_of_a_run_says_where_it_stands(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=10)
    before = Reader(page.write(run).read_text(encoding="utf-8"))
    assert "standing" not in before.sections()  # of a run planned before this was
    write_json(run.plan, {**read_json(run.plan), **standing()})
    found = Reader(page.write(run).read_text(encoding="utf-8"))
    assert found.sections().index("standing") == found.sections().index("plan") + 1
    assert "tokens a parameter" in "".join(found.text) and "Chinchilla approach 2" in "".join(found.text)
    figures = json.loads(next(text for text in found.scripts if text.startswith('{"loss"')))
    place = next(trace for trace in figures["surface"]["traces"] if trace["name"] == "this run")
    assert (place["x"], place["y"]) == ([1_377_664], [4096 * 1200])


def test_damaged_pictures_are_left_out(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=10)
    whole_plan = {**read_json(run.plan), **standing()}
    for pictures_of in ([], {"surface": 3}, {"surface": {"parameters": [1.0]}}, {"laws": "x"}):
        write_json(run.plan, {**whole_plan, "pictures": pictures_of, "chinchilla": None})
        assert "standing" not in Reader(page.write(run).read_text(encoding="utf-8")).sections()


def test_a_classifier_has_no_place_among_the_laws() -> None:
    recipe = load("demo")
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"objective": "classify"})})
    assert here.scaling(recipe, 10**6, 10**8) == {"chinchilla": None}
    assert here.drawn({"parameters": 10**6, "tokens": 10**8, "chinchilla": None}) == {}


def test_a_plan_outside_of_the_fit_says_so() -> None:
    said = [plan_figures.beyond({"here": here_}) for here_ in ([1e9, 20e9], [70e9, 1.4e12], [1e6, 1e9])]
    assert said[0] == "" and "extrapolates" in said[1] and "means little" not in said[1] and "means little" in said[2]
    figure = plan_figures.loss_surface(standing()["pictures"]["surface"])
    assert figure is not None
    lines = figure["traces"][0]["contours"]
    assert lines["start"] < lines["end"] == 12.0  # more than a guess among all words loses is not drawn
    assert 4 <= (lines["end"] - lines["start"]) / lines["size"] <= 13


def test_a_surface_is_small_enough_for_a_run_folder() -> None:
    assert len(json.dumps(standing(), indent=2)) < 60_000
    assert len(loss_surface(1e6, 1e8, 21)["loss"]) == 21
