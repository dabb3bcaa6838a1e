"""A stand-in for the Hugging Face hub, with the requests that downloading a model needs."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


class Hub(ThreadingHTTPServer):
    """Server of folder/ORG/NAME as the model ORG/NAME, with one commit under the names of REVISIONS."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.requested, self.silent = folder, list[str](), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requested.append(path)
        if self.server.silent.is_set():
            threading.Event().wait(60)
            return
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name, revision = (asked[1], asked[3]) if asked else (file[1], file[2]) if file else ("", "")
        model = self.server.folder / name
        if not name or not model.is_dir():
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif (revision or "main") not in REVISIONS:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif asked and asked[2] == "tree":
            self._json([
                {"type": "file", "path": str(one.relative_to(model)), "size": one.stat().st_size, "oid": _digest(one)}
                for one in sorted(model.rglob("*")) if one.is_file()
            ])  # fmt: skip
        elif asked:
            siblings = [{"rfilename": str(one.relative_to(model))} for one in sorted(model.rglob("*")) if one.is_file()]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        else:
            assert file is not None
            self._file(model / file[3])

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._answer(200, path.read_bytes(), {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def model_hub(folder: Path) -> Iterator[Hub]:
    """Run the hub for the duration of the block."""
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
