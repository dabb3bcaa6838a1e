"""Alerts: what is posted, and that a URL that does not answer stops nothing."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from bessemer.common.errors import BessemerError, Stopped
from bessemer.guard.alerts import post_incidents, severity_of
from bessemer.guard.incidents import CHECKPOINT_FAILED, LOST, PLATEAU, SPIKE, record
from bessemer.run.directory import RunDirectory


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    posts: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", posts
        server.shutdown()


def test_incidents_that_changed_the_run_are_posted(tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    url, posts = inbox
    run = RunDirectory(tmp_path / "mine")
    run.path.mkdir()
    record(run.incidents, LOST, step=1, cause="before", action="it was posted then")
    sleep(0.002)  # times are of milliseconds
    began = datetime.now(UTC)
    record(run.incidents, SPIKE, step=2, cause="of this command", action="the update was skipped")
    with post_incidents(run, url, began):
        record(run.incidents, PLATEAU, step=5, cause="no progress")
        record(run.incidents, SPIKE, step=6, cause="the loss is 9", action="the update was skipped")
        record(run.incidents, LOST, step=7, cause="rank 1 was killed", action="restarting")
    assert [post["what"] for post in posts] == ["spike", "spike", "lost", "finished"]
    lost = next(post for post in posts if post["what"] == "lost")
    assert lost["text"] == lost["content"] == "[error] mine: lost at step 7: rank 1 was killed; restarting"
    assert lost["incident"]["cause"] == "rank 1 was killed" and lost["step"] == 7


@pytest.mark.parametrize(
    ("error", "what", "severity"),
    [
        (Stopped("by SIGTERM"), "stopped", "warning"),
        (BessemerError("no disk"), "failed", "error"),
        (ValueError(), "failed", "error"),
    ],
)
def test_the_end_is_posted(
    tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]], error: Exception, what: str, severity: str
) -> None:
    url, posts = inbox
    with pytest.raises(type(error)), post_incidents(RunDirectory(tmp_path), url):
        raise error
    (post,) = posts
    assert (post["what"], post["severity"]) == (what, severity)


def test_a_url_that_does_not_answer_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    with post_incidents(run, "http://127.0.0.1:9/none"):
        for step in range(3):
            record(run.incidents, SPIKE, step=step, cause="x", action="y")
    assert capsys.readouterr().err.count("an alert could not be posted") == 1


def test_what_was_only_recorded_is_info() -> None:
    assert severity_of({"what": CHECKPOINT_FAILED.name, "action": "recorded"}) == "error", "nothing is saved"
    assert severity_of({"what": "unknown"}) == "info"
    assert severity_of({"what": "nonfinite", "rollback": 1}) == "error"
    assert severity_of({"what": "nonfinite", "action": "run stopped"}) == "error"
    assert severity_of({"what": "nonfinite", "action": "update skipped"}) == "warning"
    assert {severity_of({"what": what, "action": "recorded"}) for what in ("plateau", "spike")} == {"info"}
    assert severity_of({"what": "diverged", "action": "rolled back to step 3"}) == "error"
