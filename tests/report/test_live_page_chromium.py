"""The live page in a browser: it draws, follows the run, zooms, and incidents open to their documents."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

import pytest

from bessemer.report import comparison, page
from bessemer.report.live_server import Server
from bessemer.run.directory import RunDirectory
from tests import chromium
from tests.chromium import Chromium
from tests.report.conftest import MakeRun

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chrome") / "profile") as made:
        yield made


@pytest.fixture
def browser(chrome: Chromium) -> Chromium:
    """The browser with an empty page and its first settings."""
    chrome.open("about:blank")
    chrome.resize(1280, 900)
    chrome.dark(False)
    chrome.errors.clear()
    return chrome


def append(run: RunDirectory, step: int, loss: float) -> None:
    with open(run.metrics, "a") as file:
        row = {"kind": "train", "step": step, "tokens": 4096 * step, "loss": loss, "step_seconds": 0.5}
        file.write(json.dumps({**row, "tokens_per_second": 8192.0, "time": "2026-07-01T10:00:00+00:00"}) + "\n")


STEP = "document.querySelector('.done').getAttribute('aria-valuenow')"
LOSS = "document.querySelector('[data-figure=loss]')"


def open_at_curves(browser: Chromium, address: str, curves: int = 1) -> None:
    """Load the page and scroll to the loss, since only visible figures are drawn."""
    browser.open(address)
    browser.run(f"{LOSS}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.until(f"{LOSS}.data && {LOSS}.data.length >= {curves}")


def test_page_draws_and_follows_the_run(make_run: MakeRun, serve: Callable[..., Server], browser: Chromium) -> None:
    run = make_run(steps=300)
    open_at_curves(browser, serve(run).address)
    assert browser.run("location.search") == ""  # the token is no longer visible
    assert browser.run(f"{STEP} === '300'")
    append(run, 301, 1.25)
    browser.until(f"{STEP} === '301'")
    last = f"(() => {{ const x = {LOSS}.data[0].x; return x[x.length - 1]; }})()"
    browser.until(f"{last} === 301")
    assert browser.errors == []


def test_an_incident_opens_to_its_documents(make_run: MakeRun, serve: Callable[..., Server], browser: Chromium) -> None:
    run = make_run(steps=300)
    row = {"time": "2026-07-01T10:00:00+00:00", "step": 150, "what": "spike", "cause": "the loss is high", "onset": 150,
           "action": "the update was skipped", "documents": [{"sample": 1, "documents": ["code-00001:7"]}]}  # fmt: skip
    run.incidents.write_text(json.dumps(row) + "\n")
    open_at_curves(browser, serve(run).address)
    x, y = browser.run(
        f"(() => {{ const marks = [...{LOSS}.querySelectorAll('.scatterlayer .trace')].at(-1).querySelectorAll('.point'); "
        "const b = marks[0].getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    assert not browser.run("document.querySelector('#incident-0').nextElementSibling.querySelector('details').open")
    browser.click(x, y)
    browser.until("document.querySelector('#incident-0').nextElementSibling.querySelector('details').open")
    assert "code-00001:7" in browser.run("document.querySelector('#live-incidents .documents').textContent")
    append(run, 301, 1.0)  # unfolded elements stay unfolded
    browser.until(f"{STEP} === '301'")
    assert browser.run("document.querySelector('#incident-0').nextElementSibling.querySelector('details').open")
    assert browser.errors == []


def test_several_runs_are_drawn_in_one_figure(
    tmp_path: Path, make_run: MakeRun, serve: Callable[..., Server], browser: Chromium
) -> None:
    first, second = make_run(steps=300), make_run(steps=200, folder=tmp_path / "second")
    second.recipe.write_text(
        second.recipe.read_text()
        .replace('"forge"', '"<b>anvil</b> & co"')
        .replace("learning_rate = 0.01", "learning_rate = 0.02")
    )
    open_at_curves(browser, serve(first, second).address, curves=2)
    legend = f"Array.from({LOSS}.querySelectorAll('.legendtext'), (one) => one.textContent)"
    assert browser.run(legend) == ["forge", "<b>anvil</b> & co"]
    assert "train.optimizer.learning_rate" in browser.run("document.querySelector('#differences').textContent")
    browser.run("document.querySelector('a[href=\"?run=1\"]').click()")
    browser.until("document.querySelector('h1') && document.querySelector('h1').textContent === '<b>anvil</b> & co'")
    assert browser.errors == []


def test_the_page_fits_a_phone_and_reports_a_lost_server(
    make_run: MakeRun, serve: Callable[..., Server], browser: Chromium
) -> None:
    browser.resize(390, 844, mobile=True)
    server = serve(make_run(steps=50))
    open_at_curves(browser, server.address)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    server.shutdown()
    server.server_close()
    sleep(0.1)
    browser.until("document.querySelector('#heartbeat').textContent.includes('no answer')")


COLOURS = json.dumps({"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}})


def barriers(browser: Chromium, options: str = "") -> list[list[str]]:
    """Return serious accessibility violations: impact, rule, and the first element."""
    violations = "found => found.violations.map(one => [one.impact, one.id, one.nodes[0].html])"
    found = browser.run(f"axe.run({options}).then({violations})")
    return [one for one in found if one[0] in ("serious", "critical")]


@pytest.mark.long
def test_pages_have_no_serious_accessibility_violations(
    make_run: MakeRun, serve: Callable[..., Server], browser: Chromium, tmp_path: Path
) -> None:
    """Run every rule of axe-core on the report, a comparison and the live page, and the colour rules in the dark theme too."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    one, other = make_run(steps=60), make_run(steps=60, folder=tmp_path / "second")
    places = [page.write(one), comparison.write(tmp_path / "compared.html", [one, other])]
    for address in (serve(one, other).address, *(f"file://{place.resolve()}" for place in places)):
        browser.dark(False)
        open_at_curves(browser, address)
        browser.run(f"{axe};true")
        assert not barriers(browser)
        browser.dark()
        assert not barriers(browser, COLOURS)
    browser.run("document.querySelector('h1').style.color = '#222'")  # visible only in the light theme
    assert [one[1] for one in barriers(browser, COLOURS)] == ["color-contrast"]
