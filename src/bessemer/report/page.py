"""Writes report.html: one self-contained page that shows what a run did, from what lies in its folder."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from bessemer.report import figures, sections
from bessemer.report.data import read
from bessemer.run import RunFolder, write_atomic


def write(run: RunFolder) -> Path:
    """Write `run.report` and return its path. Sections appear when their data exist.

    Raises InputError when the folder holds nothing of a run.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    data = read(run)
    built = figures.build(data)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_file("template.html")).render(
        data=data,
        headline=sections.headline(data),
        tiles=sections.tiles(data),
        figures=built,
        smoothing=figures.smoothing_labels(len(data.train)),
        planned=sections.planned(data),
        samples=sections.samples(data),
        funnel=sections.funnel(data),
        token_rows=sections.token_rows(data),
        mixture=sections.mixture(data),
        incidents=sections.incidents(data),
        export=sections.export(data),
        stages=sections.stages(data),
        environment=sections.environment(data),
        style=Trusted(_file("style.css")),
        script=Trusted(_file("script.js")),
        plotly=Trusted(get_plotlyjs() if built else ""),
        figures_json=Trusted(script_json(built)),
    )
    write_atomic(run.report, page)
    return run.report


class Trusted(str):
    """Text of our own that goes into the page as it is."""

    def __html__(self) -> str:
        return self


def script_json(value: Any) -> str:
    """JSON that is safe inside <script>: no text of a document can close the element or open a comment."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (resources.files("bessemer.report") / name).read_text(encoding="utf-8")
