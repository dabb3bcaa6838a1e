"""What the live page is made of: where a run stands, its fragments, its server, and the same as text."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.report import data as run_data
from bessemer.report.data import RunReader
from bessemer.run import RunFolder
from bessemer.watch import server as server_module
from bessemer.watch.live import LivePage, RunFollower, View
from bessemer.watch.screen import screen
from bessemer.watch.server import Server
from bessemer.watch.status import seconds_a_step, status_of

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


def line(step: int, **values: Any) -> str:
    row = {"kind": "train", "step": step, "tokens": 4096 * step, "loss": 1.5, "tokens_per_second": 8192.0}
    return json.dumps({**row, "step_seconds": 0.5, "time": datetime.now(UTC).isoformat(), **values}) + "\n"


def append(run: RunFolder, text: str) -> None:
    with open(run.metrics, "a") as file:
        file.write(text)


# --- Reading again ----------------------------------------------------------------------------------------------------


def test_what_is_read_again_equals_what_is_read_at_once(make_run: Callable[..., RunFolder]) -> None:
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


def test_a_line_that_is_being_written_waits_for_its_end(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=20)
    reader, whole = RunReader(run), line(21)
    reader.read(is_growing=True)
    append(run, whole[:40])
    found = reader.read(is_growing=True)
    assert (len(found.train), found.notes) == (20, [])
    append(run, whole[40:])
    assert len(reader.read(is_growing=True).train) == 21


def test_a_log_that_was_cut_by_a_rollback_is_read_anew(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=50)
    reader = RunReader(run)
    assert len(reader.read(is_growing=True).train) == 50
    kept = [row for row in run.metrics.read_text().splitlines() if json.loads(row)["step"] <= 30]
    other = run.metrics.with_name("other")
    other.write_text("\n".join(kept) + "\n")
    other.replace(run.metrics)
    assert len(reader.read(is_growing=True).train) == 30


# --- Where a run stands -----------------------------------------------------------------------------------------------


def status(run: RunFolder) -> Any:
    return status_of(run, run_data.read(run))


def test_a_run_that_trains(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=300)
    append(run, line(301))
    with run.writing():
        found = status(run)
    assert (found.state, found.step, found.steps) == ("training", 301, 1200)
    pace = seconds_a_step(run_data.read(run))
    assert pace is not None
    assert found.seconds_left == pytest.approx(899 * pace)


def test_a_run_without_a_sign_of_progress(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=300)
    append(run, line(301, time="2026-01-01T00:00:00+00:00"))
    rows = [json.loads(row) for row in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps({**row, "time": "2026-01-01T00:00:00+00:00"}) + "\n" for row in rows))
    with run.writing():
        assert status(run).state == "silent"
    found = status(run)
    assert (found.state, found.seconds_left) == ("stopped", None)
    assert "killed" in found.sentence


def test_a_run_that_is_finished_and_one_that_has_not_begun(make_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    assert status(make_run(steps=1200)).state == "finished"
    run = make_run(steps=5, folder=tmp_path / "b")
    run.metrics.unlink()
    with run.writing():
        assert status(run).state == "preparing"


def test_a_run_without_metrics_is_as_far_as_its_newest_checkpoint(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=300)
    run.metrics.unlink()
    (run.checkpoints / "step-200").mkdir(parents=True)
    assert "Stopped: killed, or its machine lost after step 200" in status(run).sentence


def test_a_run_that_was_just_killed_is_not_training(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=300)
    append(run, line(301))
    with run.writing():
        assert status(run).state == "training"
    assert status(run).state == "stopped", "its last line is of this second, and nobody holds the folder"
    (run.path / ".lock").write_text("pid 1 on another-machine")
    assert status(run).state == "training", "of another machine the lock says nothing here"


def test_who_stopped_a_run_is_named(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=300)
    run.mixture.unlink()  # of a run that has ended
    said = {
        "the guard": "by the guard after step 300 of 1,200: see",
        "SIGTERM": "by SIGTERM after",
        "an error: no disk": "with an error: no disk.",
    }
    for stopped_by, sentence in said.items():
        row = {"began": 1.0, "at": 2.0, "from": 0, "step": 300, "redone_steps": 0, "stopped_by": stopped_by}
        run.times.write_text(json.dumps(row) + "\n")
        found = status(run)
        assert found.state == "stopped" and sentence in found.sentence
        assert ("begins at step 1, as no checkpoint was saved" in found.sentence) == (stopped_by == "SIGTERM")
    row = {"began": 1.0, "at": 2.0, "from": 0, "step": 300, "redone_steps": 0, "stopped_by": "SIGTERM", "saved": 200}
    run.times.write_text(json.dumps(row) + "\n")
    assert "its checkpoints are gone: put them back, or start over with" in status(run).sentence


def test_the_lock_is_seen_and_not_taken(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not run.is_being_written()
    with run.writing():
        (run.path / "recipe.toml").touch()
        assert run.is_being_written()
        assert run.log.parent == run.path
    assert not run.is_being_written()
    script = "import sys; from pathlib import Path; from bessemer.run import RunFolder\n"
    script += f"with RunFolder(Path({str(run.path)!r})).writing():\n  print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert run.is_being_written()
        other.communicate()


# --- The page ---------------------------------------------------------------------------------------------------------


def test_documents_samples_names_and_logs_are_escaped(make_run: Callable[..., RunFolder]) -> None:
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
    html = page.document(View())
    assert "<img" not in html
    assert len(re.findall("<script", html)) == 5  # the page's own: three files and two blocks of data
    for fragment in page.state(View())["fragments"].values():
        assert "<script" not in fragment and "<img" not in fragment


def test_unchanged_pages_are_not_made_again(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=50)
    page = LivePage([run])
    first = page.state(View())
    assert set(page.state(View(), first["version"])) == {"version"}
    append(run, line(51))
    changed = page.state(View(), first["version"])
    assert changed["version"] != first["version"]
    assert changed["figures"]["loss"]["traces"][0]["x"][-1] == 51
    assert list(changed["fragments"]) == list(first["fragments"])


@pytest.mark.parametrize("damage", ["empty", "text", "binary", "recipe", "cut", "null"])
def test_damaged_folders_are_shown_as_far_as_they_go(make_run: Callable[..., RunFolder], damage: str) -> None:
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
    for view in (View(), View(steps=(10.0, 20.0))):
        assert LivePage([run]).document(view).startswith("<!doctype html>")
    assert screen(RunFollower(run).watched())


# --- The server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(make_run: Callable[..., RunFolder]) -> Iterator[Server]:
    with Server([make_run(steps=50)], 0) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield made
        made.shutdown()


def ask(server: Server, path: str, **headers: str) -> tuple[int, str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_address[1]}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode("utf-8", errors="replace"), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_only_those_who_know_the_token_see_anything(server: Server) -> None:
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


@pytest.mark.parametrize(
    "query", ["run=1", "run=x", "window=9", "window=x", "from=1&to=x", "from=5&to=1", "from=nan&to=2"]
)
def test_what_there_is_not_is_not_found(server: Server, query: str) -> None:
    for path in ("/", "/state"):
        assert ask(server, f"{path}?{query}&token={server.token}")[0] == 404
    assert ask(server, f"/secret?token={server.token}")[0] == 404


BAD_LINES = (
    b"GET http://[::1 HTTP/1.1", b"GET //[/?token=TOKEN HTTP/1.0", b"GET /%zz?token=TOKEN&run=%ff HTTP/1.1", b"GET", b"\xff\xfe /",
    b"GET /?token=TOKEN&run=" + b"9" * 5000 + b" HTTP/1.1", b"GET /?token=TOKEN&from=1e999&to=nan HTTP/1.1",
    b"GET /state?token=TOKEN&window=" + "\u0663".encode() + b" HTTP/1.1", b"GET /" + b"a" * 70000 + b" HTTP/1.1",
)  # fmt: skip


def sent(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_request_is_answered_as_one(server: Server, line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    request = line.replace(b"TOKEN", server.token.encode())
    host = f"127.0.0.1:{server.server_address[1]}".encode()
    with sent(server, request + b"\r\nHost: " + host + b"\r\n\r\n") as connection, connection.makefile("rb") as answer:
        assert re.search(rb"\b(400|403|404|414)\b", answer.read())
    assert ask(server, f"/?token={server.token}")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_page_that_hangs_up_early_is_no_error(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    host = f"127.0.0.1:{server.server_address[1]}"
    for _ in range(5):
        connection = sent(server, f"GET /plotly.js?token={server.token} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    with sent(server, b"GET /pl"):
        pass
    assert ask(server, f"/?token={server.token}")[0] == 200
    while threading.active_count() > 2 and any("process_request" in thread.name for thread in threading.enumerate()):
        sleep(0.01)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("drips", [False, True])
def test_a_connection_that_does_not_end_is_ended(
    server: Server, drips: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that says nothing, and one that says a byte now and then."""
    monkeypatch.setattr(server_module, "CONNECTION_SECONDS", 0.5 if drips else 600.0)
    monkeypatch.setattr(server_module._Handler, "timeout", 600.0 if drips else 0.5)
    with sent(server, b"GET /") as connection:
        connection.settimeout(0.05)
        received: bytes | None = None
        while received is None:
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1)
            if drips and received is None:
                with contextlib.suppress(OSError):
                    connection.send(b"a")
    assert received == b"" and ask(server, f"/?token={server.token}")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_page_that_cannot_be_made_is_named_in_a_line(
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
    assert {"version", "fragments", "figures", "sections", "poll", "live", "last", "name"} <= set(state)
    code, text, _ = ask(server, f"/state?token={server.token}&since={state['version']}")
    assert set(json.loads(text)) == {"version", "poll"}


def test_a_port_that_is_taken_is_named(server: Server, make_run: Callable[..., RunFolder]) -> None:
    with pytest.raises(InputError, match=r"--port \d+: cannot be listened on"):
        Server([RunFolder(Path("nothing"))], server.server_address[1])


# --- As text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["short", "with space and more", "../../../../../../etc"])
def test_a_token_that_could_be_guessed_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(InputError, match="16 or more letters"):
        Server([RunFolder(tmp_path)], 0, token)
