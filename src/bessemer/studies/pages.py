"""Pages of studies: one of each, and an index of all. They need no script; figures are SVG in the colours of the page."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from bessemer.errors import Stopped
from bessemer.report.template import render_page, write_page
from bessemer.studies import STUDIES, load, run
from bessemer.studies.base import Variation
from bessemer.terminal import duration, say, warn


def write(path: Path, name: str, results: dict[str, Any], text: str) -> Path:
    """The page of a study. text: its table, for a study that is no variation."""
    subject = load(name)
    values = {
        "results": results,
        "text": text,
        "plot": subject.plot(results),
        "columns": [],
        "rows": [],
        "variants": [],
    }
    if isinstance(subject, Variation):
        titles, values["rows"] = subject.columns(results)
        values["columns"] = [titles[0], *(f"n|{title}" for title in titles[1:])]
        values["variants"] = [
            (variant, ", ".join(f"{key} = {value}" for key, value in keys.items()) or "as the base")
            for variant, keys in results["settings"]["variants"].items()
        ]
    return write_page(path, render_page("study.html", name, "study", results["question"], values))


def run_all(folder: Path) -> dict[str, Any]:
    """Run every study, long ones in short, and write their pages and index.html, which is there from the first one on.

    Returns by study `seconds`, and `shows` or `error`: one that fails is named, and the others go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    for number, (name, study) in enumerate(STUDIES.items(), start=1):
        say(f"{name} ({number} of {len(STUDIES)})")
        started = perf_counter()
        try:
            results, text = run(name, study.long, folder / name if name == "layouts" else None)
            write(folder / f"{name}.html", name, results, text)
            done[name] = {"shows": results["shows"], "plot": load(name).plot(results)}
            if results.get("missed"):
                done[name]["error"] = results["missed"][0]
        except Stopped:
            raise
        except Exception as error:
            done[name] = {"error": str(error) or type(error).__name__}
        if "error" in done[name]:
            warn(f"study {name}: {done[name]['error']}")
        done[name] |= {"seconds": perf_counter() - started}
        write_page(folder / "index.html", _index(done))
    return {name: {key: value for key, value in entry.items() if key != "plot"} for name, entry in done.items()}


def _index(done: dict[str, dict[str, Any]]) -> str:
    failed = [name for name, entry in done.items() if "error" in entry]
    total = duration(sum(entry["seconds"] for entry in done.values()))
    headline = f"{len(done)} of {len(STUDIES)} studies, run on this machine in {total}"
    headline += f"; {len(failed)} failed." if failed else "."
    notes = [f"Failed: {', '.join(failed)}."] if failed else []
    return render_page("studies.html", "Studies", "studies", headline, {"done": done, "studies": STUDIES}, notes=notes)
