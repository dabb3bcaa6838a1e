"""Alerts: incidents of a run, and its end, posted to a URL as they happen.

The process that starts a training follows incidents.jsonl, which the ranks and the launcher write. It outlives the ranks, so it
can also post the loss of a rank.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from bessemer.common.console import warn
from bessemer.common.errors import InputError, Stopped
from bessemer.guard.incidents import CHECKPOINT_FAILED, INCIDENT_KINDS, MIRROR_FAILED, RECORDED, STOPPED
from bessemer.run.directory import RunDirectory

Severity = Literal["info", "warning", "error"]
EVERY_SECONDS, TIMEOUT_SECONDS = 1.0, 10.0


def severity_of(incident: dict[str, Any]) -> Severity:
    """Return the severity of an incident.

    "info" is for an incident that was only recorded, and "warning" for a skipped update. "error" is for a rollback, a restart,
    a stop, and a checkpoint that was not saved.
    """
    kind, action = INCIDENT_KINDS.get(str(incident.get("what"))), str(incident.get("action"))
    if kind in (CHECKPOINT_FAILED, MIRROR_FAILED):
        return "error"
    if kind is None or kind.response == "record" or action == RECORDED:
        return "info"
    is_skipped = kind.response == "skip" and "rollback" not in incident and not action.endswith(STOPPED)
    return "warning" if is_skipped else "error"


def webhook_url(variable: str | None) -> str | None:
    """Return the URL in an environment variable; None if no variable is named. Raises InputError if it holds no URL."""
    if variable is None:
        return None
    if not re.fullmatch(r"https?://[^\s/]+\S*", url := os.environ.get(variable, "").strip()):
        raise InputError(f"report.webhook: the environment variable {variable} is not an http(s):// URL; set it")
    return url


@contextmanager
def post_incidents(run: RunDirectory, url: str | None, since: datetime | None = None) -> Iterator[None]:
    """Post the incidents of a training that need attention, and how it ended. Without a URL, do nothing.

    Incidents from `since` on are posted even if they were recorded before the training started.
    """
    if url is None:
        yield
        return
    posts = _Posts(run, url, since)
    thread = threading.Thread(target=posts.follow, name="alerts", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        posts.end(thread)
        is_stop = isinstance(error, Stopped | KeyboardInterrupt)
        how: tuple[Severity, str] = ("warning", "stopped") if is_stop else ("error", "failed")
        posts.post(*how, str(error) or type(error).__name__)
        raise
    posts.end(thread)
    posts.post("info", "finished", "all steps are trained")


def _time_of(line: bytes) -> datetime:
    """Return when an incident was recorded; the epoch if the line has no time."""
    try:
        return datetime.fromisoformat(json.loads(line)["time"])
    except (ValueError, TypeError, KeyError):
        return datetime.fromtimestamp(0, UTC)


class _Posts:
    def __init__(self, run: RunDirectory, url: str, since: datetime | None) -> None:
        self._run, self._url = run, url
        lines = run.incidents.read_bytes().splitlines(keepends=True) if run.incidents.exists() else []
        since = since and since.replace(microsecond=since.microsecond // 1000 * 1000)  # incidents store milliseconds
        while lines and since is not None and _time_of(lines[-1]) >= since:
            lines.pop()
        self._at = sum(map(len, lines))
        self._ended, self._has_failed = threading.Event(), False

    def follow(self) -> None:
        """Post new incidents until the training has ended."""
        while not self._ended.wait(EVERY_SECONDS):
            self._post_new()
        self._post_new()

    def end(self, thread: threading.Thread) -> None:
        self._ended.set()
        thread.join(2 * TIMEOUT_SECONDS)

    def _post_new(self) -> None:
        if not self._run.incidents.exists():
            return
        with open(self._run.incidents, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):  # the line is still being written
                    return
                self._at += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and (severity := severity_of(row)) != "info":
                    message = f"{row.get('cause')}; {row.get('action')}"
                    self.post(severity, str(row.get("what")), message, step=row.get("step"), incident=row)

    def post(self, severity: Severity, what: str, message: str, **more: Any) -> None:
        """Post one alert about `what` with a message; `more` has more JSON values, such as the step.

        Slack and Mattermost show its `text`, Discord its `content`. A failure is reported once, and the training continues.
        """
        where = f" at step {more['step']:,}" if isinstance(more.get("step"), int) else ""
        text = f"[{severity}] {self._run.path.name}: {what}{where}: {message}"
        time = datetime.now(UTC).isoformat(timespec="seconds")
        body = {"run": self._run.path.name, "severity": severity, "what": what, "time": time, **more,
                "text": text, "content": text[:1900]}  # fmt: skip
        headers = {"Content-Type": "application/json", "User-Agent": "bessemer"}
        try:
            request = urllib.request.Request(self._url, json.dumps(body, default=str).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                pass
        except Exception as error:
            if not self._has_failed:
                # The messages of other errors may include the URL, which is a secret.
                why = error if isinstance(error, OSError) else type(error).__name__
                warn(f"report.webhook: posting an alert failed ({why}); the training continues")
            self._has_failed = True
