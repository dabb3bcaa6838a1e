"""The state of one command that works on a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from rich.markup import escape

from bessemer.common import interrupt
from bessemer.common.console import duration, progress, say, warn
from bessemer.common.errors import Stopped, memory_error
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json_or_none, write_json


@dataclass
class Session:
    """One command's work on one run.

    Attributes:
        recipe: The recipe as the user gave it.
        run: The run directory.
        results: One dict per finished stage with its `name`, `seconds` and `skipped`.
        warnings: Warnings of the current stage, printed when it ends.
        began: Start time of the command.
    """

    recipe: Recipe
    run: RunDirectory
    results: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of the current stage, printed at its end
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def stage(self, name: str, work: Callable[[], str | None], current: bool = False, result: str = "") -> None:
        """Run a stage and print its result line, or print that it was skipped.

        Args:
            name: Name of the stage.
            work: Function that does the work and returns the result line; None if there was nothing to do.
            current: True to skip `work`, because the stage's output is up to date.
            result: Text to print for a skipped stage.
        """
        started = perf_counter()
        try:
            interrupt.check()
            with progress(name):
                line = None if current else work()
        except KeyboardInterrupt:
            saved = "".join(
                f"training is saved up to step {step:,}; " for step in checkpoint_steps(self.run.checkpoints)[-1:]
            )
            raise Stopped(f"stopped in {name}; {saved}the same command continues") from None
        except (MemoryError, RuntimeError) as error:
            raise memory_error(error, name) or error from error
        seconds = perf_counter() - started
        self.results.append({"name": name, "seconds": round(seconds, 3), "skipped": line is None})
        if line is None:
            say(f"[dim]- {name:<9} unchanged, skipped{result and ': '}{escape(result)}[/]")
        else:
            mark = "[yellow]![/]" if self.warnings else "[green]✓[/]"
            say(f"{mark} [bold]{name:<9}[/] {line} [dim]{duration(seconds)}[/]")
            while self.warnings:
                warn(self.warnings.pop(0))
        if self.run.path.exists():
            write_json(self.run.path / "stages.json", {"stages": self._all_stages()})

    def _all_stages(self) -> list[dict[str, Any]]:
        """Merge this command's stages with those of earlier commands; a skipped stage keeps its earlier time."""
        path = self.run.path / "stages.json"
        rows = (read_json_or_none(path) or {}).get("stages")
        before = {row["name"]: row for row in rows if "name" in row} if isinstance(rows, list) else {}
        for row in self.results:
            before[row["name"]] = row if not row["skipped"] else {**row, **before.get(row["name"], {}), "skipped": True}
        return list(before.values())
