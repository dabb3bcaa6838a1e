"""Writes report.html: one file that needs nothing but a browser.

The page loads nothing: style, script, plotly.js and data stand in it. Its text and tables are there without
JavaScript; the curves need it. What documents say is untrusted: the template escapes everything, and a
content security policy lets only the scripts written here run, by their hashes, and no request leave the
page.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError
from bessemer.report import corpus, figures, findings, quality, rows
from bessemer.report import data as run_data
from bessemer.report.data import RunData
from bessemer.report.fertility import fertility
from bessemer.run import RunFolder, write_atomic


def write(run: RunFolder) -> Path:
    """Write `run.report` from what lies in the run folder, atomically, and return where it lies.

    Raises InputError when the folder holds nothing of a run.
    """
    # A lone surrogate, as a damaged excerpt may hold, cannot be written as UTF-8.
    write_atomic(run.report, render(run_data.read(run)).encode("utf-8", errors="replace"))
    return run.report


def render(data: RunData) -> str:
    """The page as HTML."""
    return compose("template.html", _context(data))


def compose(template: str, context: dict[str, Any]) -> str:
    """A page of this folder's style, script and frame as HTML, from one of its templates.

    context: what the template reads, with `figures`, by their id, where it draws any.
    """
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BessemerError(f"the report needs {error.name}; install it with: pip install 'bessemer[report]'") from None

    draws = bool(context["figures"])
    script = _part("script.js")
    plotly = str(get_plotlyjs()).replace("\r\n", "\n") if draws else ""
    environment = Environment(
        loader=DictLoader({name: _part(name) for name in ("frame.html", "parts.html", template)}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Compact, and in the order in which the figures were built.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template(template).render(
        **context,
        style=Markup(_part("style.css")),
        script=Markup(script),
        plotly=Markup(plotly),
        policy=_policy(script, plotly),
    )


def _context(data: RunData) -> dict[str, Any]:
    compared = findings.comparison(data)
    context: dict[str, Any] = {
        "name": data.name,
        "kind": "run report",
        "headline": findings.headline(data),
        "origin": rows.origin(data),
        "tiles": findings.tiles(data),
        "notes": data.notes,
        "curves": figures.curves(data),
        "curve_finding": findings.curve_finding(data),
        "smoothing": figures.smoothing_labels(len(data.train)),
        "validations": findings.validations(data),
        "comparison": compared,
        "plan_finding": findings.plan_finding(data, compared),
        "memory": findings.memory_parts(data),
        "samples": rows.samples(data),
        "fill_ins": rows.fill_ins(data),
        "classes": rows.classes(data),
        "loss_unit": data.loss_unit,
        "corpus": rows.corpus(data),
        "corpus_parts": corpus.parts(data),
        "lengths": figures.lengths(data),
        "near_duplicates": corpus.near_duplicates(data),
        "quality": quality.section(data),
        "quality_figures": quality.figures(data),
        "tokens": rows.tokens(data),
        "fertility": fertility(data),
        "mixture": rows.mixture(data),
        "incidents": rows.incidents(data),
        "export": rows.export(data),
        "stages": rows.stages(data),
        "environment": rows.environment(data),
        "recipe": data.recipe_text.splitlines(),
    }
    present = {
        "curves": ("Curves", context["curves"]),
        "plan": ("Planned and measured", compared or context["memory"]),
        "samples": ("Samples", context["samples"]),
        "fill_ins": ("Filled in", context["fill_ins"]),
        "classes": ("Classes", context["classes"]),
        "corpus": ("Corpus", context["corpus"]),
        "quality": ("Quality", context["quality"]),
        "data": ("Tokens and mixture", context["tokens"] or context["mixture"]),
        "incidents": ("Incidents", len(data.train) or data.incidents),
        "export": ("Export", context["export"]),
        "stages": ("Stages", context["stages"]),
        "environment": ("Environment", context["environment"]),
        "recipe": ("Recipe", context["recipe"]),
    }
    shown = {key: title for key, (title, content) in present.items() if content}
    corpus_figures = [figure for name in ("lengths", "near_duplicates") if (figure := context[name])]
    drawn = [*context["curves"], *corpus_figures, *context["quality_figures"]]
    return {**context, "sections": shown, "figures": {figure["id"]: figure for figure in drawn}}


def _policy(*scripts: str) -> str:
    """What the browser may do with this page: run these scripts, and load nothing from anywhere."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts if script]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _part(name: str) -> str:
    return (resources.files("bessemer.report") / name).read_text(encoding="utf-8")
