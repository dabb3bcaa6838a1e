"""The live page: the status of a run, its fragments and its server."""

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.report import data as run_data
from bessemer.report.data import RunReader
from bessemer.report.live_page import LivePage
from bessemer.report.live_server import Server
from bessemer.report.run_status import read_status, seconds_a_step
from bessemer.run.directory import RunDirectory
from tests.report.conftest import MakeRun

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


def line(step: int, **values: Any) -> str:
    row = {"kind": "train", "step": step, "tokens": 4096 * step, "loss": 1.5, "tokens_per_second": 8192.0}
    return json.dumps({**row, "step_seconds": 0.5, "time": datetime.now(UTC).isoformat(), **values}) + "\n"


def append(run: RunDirectory, text: str) -> None:
    with open(run.metrics, "a") as file:
        file.write(text)


def test_incremental_reading_equals_reading_at_once(make_run: MakeRun) -> None:
    run = make_run(steps=200)
    rows = run.metrics.read_text().splitlines(keepends=True)
    reader = RunReader(run)
    run.metrics.write_text("")
    for start in range(0, len(rows), 37):
        append(run, "".join(rows[start : start + 37]))
        found = reader.read(is_growing=True)
    whole = run_data.read(run)
    for kind in ("train", "validation", "inside"):
        one, other = getattr(found, kind), getattr(whole, kind)
        assert one.step.tolist() == other.step.tolist()
        assert one.columns.keys() == other.columns.keys()
        assert all(np.array_equal(one.columns[name], other.columns[name], equal_nan=True) for name in one.columns)
    assert found.peak_memory == whole.peak_memory


def test_an_incomplete_line_is_read_once_complete(make_run: MakeRun) -> None:
    run = make_run(steps=20)
    reader, whole = RunReader(run), line(21)
    reader.read(is_growing=True)
    append(run, whole[:40])
    found = reader.read(is_growing=True)
    assert (len(found.train), found.notes) == (20, [])
    append(run, whole[40:])
    assert len(reader.read(is_growing=True).train) == 21


def test_a_log_truncated_by_a_rollback_is_read_again(make_run: MakeRun) -> None:
    run = make_run(steps=50)
    reader = RunReader(run)
    assert len(reader.read(is_growing=True).train) == 50
    kept = [row for row in run.metrics.read_text().splitlines() if json.loads(row)["step"] <= 30]
    other = run.metrics.with_name("other")
    other.write_text("\n".join(kept) + "\n")
    other.replace(run.metrics)
    assert len(reader.read(is_growing=True).train) == 30


def status(run: RunDirectory) -> Any:
    return read_status(run, run_data.read(run))


def test_status_of_a_training_and_a_killed_run(make_run: MakeRun) -> None:
    run = make_run(steps=300)
    append(run, line(301))
    with run.lock():
        found = status(run)
    assert (found.state, found.step, found.steps) == ("training", 301, 1200)
    pace = seconds_a_step(run_data.read(run))
    assert pace is not None and found.seconds_left == pytest.approx(899 * pace)
    found = status(run)
    assert (found.state, found.seconds_left) == ("stopped", None), "nobody holds the folder"
    assert "killed" in found.sentence
    (run.path / ".lock").write_text("pid 1 on another-machine")
    assert status(run).state == "training", "of another machine the lock says nothing here"
    run.metrics.write_text(re.sub('"time": "[^"]*"', '"time": "2026-01-01T00:00:00+00:00"', run.metrics.read_text()))
    with run.lock():
        assert status(run).state == "silent"


def test_status_of_a_finished_and_an_unstarted_run(make_run: MakeRun, tmp_path: Path) -> None:
    assert status(make_run(steps=1200)).state == "finished"
    run = make_run(steps=5, folder=tmp_path / "b")
    run.metrics.unlink()
    with run.lock():
        assert status(run).state == "preparing"
    (run.checkpoints / "step-200").mkdir(parents=True)
    assert "after step 200" in status(run).sentence, "as far as its newest checkpoint"


def test_the_status_says_who_stopped_a_run(make_run: MakeRun) -> None:
    run = make_run(steps=300)
    run.mixture.unlink()  # of a finished run
    row = {"began": 1.0, "at": 2.0, "from": 0, "step": 300, "redone_steps": 0}
    for more, says in (
        ({"stopped_by": "the guard"}, "by the guard after step 300 of 1,200"),
        ({"stopped_by": "SIGTERM"}, "starts at step 1"),
        ({"stopped_by": "an error: no disk"}, "an error: no disk"),
        ({"stopped_by": "SIGTERM", "saved": 200}, "--restart"),
    ):
        run.times.write_text(json.dumps({**row, **more}) + "\n")
        found = status(run)
        assert found.state == "stopped" and says in found.sentence


def test_documents_samples_names_and_logs_are_escaped(make_run: MakeRun) -> None:
    run = make_run(steps=50, hostile=HOSTILE)
    run.recipe.write_text(run.recipe.read_text().replace('"forge"', json.dumps(HOSTILE)))
    append(run, json.dumps({"kind": "sample", "step": 50, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    incident = {
        "step": 3,
        "what": HOSTILE,
        "cause": HOSTILE,
        "action": HOSTILE,
        "documents": [HOSTILE],
        "advice": HOSTILE,
    }
    run.incidents.write_text(json.dumps(incident) + "\n")
    run.log.write_text(HOSTILE)
    page = LivePage([run])
    html = page.document()
    assert "<img" not in html
    assert len(re.findall("<script", html)) == 5  # the page's own: three files and two blocks of data
    for fragment in page.state()["fragments"].values():
        assert "<script" not in fragment and "<img" not in fragment


def test_unchanged_pages_are_not_generated_again(make_run: MakeRun) -> None:
    run = make_run(steps=50)
    page = LivePage([run])
    first = page.state()
    assert set(page.state(None, first["version"])) == {"version"}
    append(run, line(51))
    changed = page.state(None, first["version"])
    assert changed["version"] != first["version"]
    assert changed["figures"]["loss"]["traces"][0]["x"][-1] == 51
    assert list(changed["fragments"]) == list(first["fragments"])


@pytest.mark.parametrize("damage", ["empty", "text", "binary", "recipe", "cut", "null"])
def test_readable_parts_of_damaged_runs_are_shown(make_run: MakeRun, damage: str) -> None:
    run = make_run(steps=50)
    match damage:
        case "empty":
            for path in sorted(run.path.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
        case "text":
            run.metrics.write_text("not a log\n")
        case "binary":
            run.metrics.write_bytes(bytes(range(256)) * 10)
        case "recipe":
            run.recipe.write_text("[run\n")
        case "cut":
            run.metrics.write_bytes(run.metrics.read_bytes()[:-20])
        case "null":
            run.plan.write_text("null")
    assert LivePage([run]).document().startswith("<!doctype html>")


@pytest.fixture
def server(make_run: MakeRun, serve: Callable[..., Server]) -> Server:
    return serve(make_run(steps=50))


def ask(server: Server, path: str, **headers: str) -> tuple[int, str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_address[1]}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode("utf-8", errors="replace"), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_requests_without_the_token_are_denied(server: Server) -> None:
    for path in ("/", "/state", "/plotly.js", "/?token=wrong", "/state?token=", "/../etc/passwd"):
        code, text, _ = ask(server, path)
        assert code == 403
        assert "token" in text and "forge" not in text
    code, text, headers = ask(server, f"/?token={server.token}")
    assert code == 200 and "forge" in text
    cookie = headers["Set-Cookie"].split(";")[0]
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert ask(server, "/state", Cookie=cookie)[0] == 200
    assert ask(server, "/state", Cookie="x=;;;=\\")[0] == 403
    assert ask(server, f"/?token={server.token}", Host="evil.example")[0] == 403  # another name for this machine


@pytest.mark.parametrize("query", ["run=1", "run=x", "run=-1", "run=" + "9" * 5000])
def test_unknown_paths_are_not_found(server: Server, query: str) -> None:
    for path in ("/", "/state"):
        assert ask(server, f"{path}?{query}&token={server.token}")[0] == 404
    assert ask(server, f"/secret?token={server.token}")[0] == 404


BAD_LINES = (
    b"GET http://[::1 HTTP/1.1", b"GET /%zz?token=TOKEN&run=%ff HTTP/1.1", b"GET", b"\xff\xfe /", b"GET /" + b"a" * 70000 + b" HTTP/1.1",
)  # fmt: skip


def sent(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=300)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_request_gets_an_error_response(server: Server, line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    request = line.replace(b"TOKEN", server.token.encode())
    host = f"127.0.0.1:{server.server_address[1]}".encode()
    with sent(server, request + b"\r\nHost: " + host + b"\r\n\r\n") as connection, connection.makefile("rb") as answer:
        assert re.search(rb"\b(400|403|404|414)\b", answer.read())
    assert ask(server, f"/?token={server.token}")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_silent_connection_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bessemer.report.live_server._Handler.timeout", 0.5)
    with sent(server, b"GET /") as connection:
        assert connection.recv(1) == b""
    assert ask(server, f"/?token={server.token}")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_failing_page_gives_a_one_line_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(self: LivePage, *given: object) -> None:
        raise PermissionError(13, "no", "x")

    monkeypatch.setattr(LivePage, "state", fails)
    with pytest.raises(OSError):
        ask(server, f"/state?token={server.token}")
    error = capfd.readouterr().err
    assert "PermissionError" in error and "Traceback" not in error


def test_the_state_is_json_and_small(server: Server) -> None:
    code, text, _ = ask(server, f"/state?token={server.token}")
    state = json.loads(text)
    assert code == 200
    assert {"version", "fragments", "figures", "sections", "live", "last", "name"} <= set(state)
    code, text, _ = ask(server, f"/state?token={server.token}&since={state['version']}")
    assert set(json.loads(text)) == {"version"}


def test_a_port_in_use_is_named(server: Server, make_run: MakeRun) -> None:
    with pytest.raises(InputError, match=r"--port \d+"):
        Server([RunDirectory(Path("nothing"))], server.server_address[1])
