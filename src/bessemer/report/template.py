"""HTML pages that load nothing: the template environment, its filters, and the frame around page sections.

Templates show JSON of a run directory, whatever its shape. A missing key is undefined and renders as nothing, and filters
render a dash for values that are not numbers. All text is escaped, and a content security policy allows only this package's
scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.console import amount, duration, interval, score, size, step_time
from bessemer.common.errors import BessemerError, require_import
from bessemer.report import corpus, curves, ladder, sections, summary
from bessemer.report.data import Json, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Tile, capitalised, clock, known, percent, source_style, words
from bessemer.report.story import story
from bessemer.run.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment

    from bessemer.report.run_status import RunStatus

CONTROL_CHARACTERS = dict.fromkeys({*range(32), 127} - {*map(ord, "\t\n\r")}, "\N{REPLACEMENT CHARACTER}")


def _shown(form: Callable[[float], str]) -> Callable[[Any], str]:
    """Return a filter that formats a number, and a dash for anything else."""
    return lambda value: known(as_number(value), form)


FILTERS: dict[str, Callable[..., Any]] = {
    "number": as_number, "zero": number_or_0, "object": as_object, "objects": as_objects, "text": as_text,
    "pairs": lambda value: as_object(value).items(), "words": words, "clock": clock, "capitalised": capitalised,
    "fixed": lambda value, form: known(as_number(value), form.format), "percent": lambda value: percent(as_number(value)),
    "interval": lambda low, high: interval(as_number(low), as_number(high)),
    **{name: _shown(form) for name, form in {
        "amount": amount, "count": "{:,.0f}".format, "duration": duration, "share": "{:.1%}".format,
        "share2": "{:.2%}".format, "short_time": step_time, "size": size, "score": score,
    }.items()},
}  # fmt: skip


PAGE_MARK = " · Bessemer "  # contained in the title of each page


def write_page(path: Path, html: str) -> Path:
    """Write a page atomically. Lone surrogates, as in damaged excerpts, are replaced because UTF-8 cannot encode them."""
    write_atomic(path, html.encode("utf-8", errors="replace"))
    return path


@cache
def environment() -> Environment:
    """Return the template environment, cached because compiling templates takes longer than rendering them.

    Raises BessemerError if a library is missing.
    """
    with require_import("the report needs plotly and jinja2; pip install 'bessemer[report]'", BessemerError):
        import plotly.offline  # noqa: F401
        from jinja2 import ChainableUndefined, Environment, PackageLoader

    class JsonEnvironment(Environment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, dict):  # a template means a key, not a method of dict
                return obj.get(attribute, self.undefined(obj=obj, name=attribute))
            return super().getattr(obj, attribute)

    result = JsonEnvironment(
        loader=PackageLoader("bessemer.report"), autoescape=True, undefined=ChainableUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: value.translate(CONTROL_CHARACTERS) if type(value) is str else value,
    )  # fmt: skip
    result.filters |= FILTERS
    result.globals |= {
        "corpus": corpus, "ladder": ladder, "sections": sections, "summary": summary, "curves": curves,
        "story": story, "ink": lambda data, source: source_style(data, source)["ink"],
    }  # fmt: skip
    # Compact JSON that keeps the order in which figures were built
    result.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return result


def render_page(
    template: str, name: str, kind: str, headline: str, values: Json, *, origin: str = "", notes: Sequence[str] = (),
    tiles: Sequence[Tile] = (), status: RunStatus | None = None,
) -> str:  # fmt: skip
    """Render an HTML page: a header, the sections that the template makes from `values`, and the figures.

    Args:
        template: File name of the template.
        name: Name of the run or plan, for the title.
        kind: Kind of page, such as "plan", for the title.
        headline: Sentence at the top.
        values: Variables of the template. It also gets `page`, to which it adds its section titles and figures.
        origin: Sentence on where the values come from.
        notes: Sentences with warnings.
        tiles: Key figures at the top.
        status: State of a run in training; None for other pages.
    """
    page: Json = {"sections": [], "figures": []}
    body = environment().get_template(template).render(page=page, **values)
    figures = {figure["id"]: figure for figure in page["figures"]}
    script, plotly = page_file("script.js"), page_file("plotly.js") if figures else ""
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (script, plotly) if code]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return environment().get_template("page.html").render(
        name=name, kind=kind, headline=headline, origin=origin, notes=notes, tiles=tiles, status=status,
        sections=page["sections"], figures=figures, body=body, style=page_file("style.css"), script=script, plotly=plotly,
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
    )  # fmt: skip


@cache
def page_file(name: str) -> str:
    """Return the text of style.css or script.js from this package, or of plotly.js from the plotly library."""
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs()).replace("\r\n", "\n")
    return (resources.files("bessemer.report") / name).read_text(encoding="utf-8")
