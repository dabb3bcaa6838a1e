"""HTTP server of the live page on 127.0.0.1, for clients that know its token."""

from __future__ import annotations

import gzip
import hmac
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bessemer.common.console import warn
from bessemer.common.errors import InputError
from bessemer.report.live_page import LivePage
from bessemer.report.template import page_file
from bessemer.run.directory import RunDirectory

HOST, PORT = "127.0.0.1", 8421
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FORBIDDEN = "This page needs the token that `bessemer watch` printed with its address: open that whole address."
IDLE_SECONDS = 10.0  # timeout of an idle connection


@cache
def _asset(name: str) -> bytes:
    """Return a script or style sheet, gzip-compressed."""
    return gzip.compress(page_file(name).encode(), compresslevel=5)


ASSETS = {"style.css": "text/css", **dict.fromkeys(("script.js", "live.js", "plotly.js"), "text/javascript")}


class Server(ThreadingHTTPServer):
    """The HTTP server of one live page."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDirectory], port: int | None = None) -> None:
        """Listen on `port`; None: on the default port or, if it is taken, on any free one.

        Raises InputError if `port` is not available.
        """
        self.page, self.token, self.num_runs = LivePage(runs), secrets.token_urlsafe(16), len(runs)
        try:
            super().__init__((HOST, PORT if port is None else port), _Handler)
        except (OSError, OverflowError) as error:
            if port is not None:
                raise InputError(f"--port {port}: it cannot be opened ({error}); choose another") from None
            super().__init__((HOST, 0), _Handler)
        bound = self.server_address[1]
        self.address = f"http://{HOST}:{bound}/?token={self.token}"
        # A request for another host name comes from another site whose name resolves to this machine (DNS rebinding).
        self.hosts = (f"{HOST}:{bound}", f"localhost:{bound}")
        self.cookie = f"bessemer_{bound}"  # cookies are shared between ports, so the name contains the port
        _asset("plotly.js")  # compress it now instead of at the first request

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections closed by the client, and warn of other failures in one line."""
        if not isinstance(error := sys.exception(), ConnectionError | TimeoutError):
            warn(f"watch: a request failed: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "Bessemer", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            return self._send(400, "text/plain", b"This is not an address")
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if self.headers.get("Host", "") not in self.server.hosts or not self._is_known(query):
            return self._send(403, "text/plain", FORBIDDEN.encode())
        if (name := url.path[1:]) in ASSETS:
            return self._send(200, ASSETS[name], _asset(name), encoding="gzip", cache="max-age=3600")
        if url.path not in ("/", "/state"):
            return self._send(404, "text/plain", b"Not found; the page is at /")
        number = query.get("run")
        if number not in (None, *map(str, range(self.server.num_runs))):
            return self._send(404, "text/plain", b"No such run; the page is at /")
        run = None if number is None else int(number)
        if url.path == "/":
            return self._send(200, "text/html", self.server.page.document(run).encode("utf-8", errors="replace"))
        state = self.server.page.state(run, query.get("since", ""))
        return self._send(200, "application/json", json.dumps(state, separators=(",", ":"), allow_nan=False).encode())

    def _is_known(self, query: dict[str, str]) -> bool:
        """Return True if the request has the token, in its URL or in the cookie that the page set."""
        cookies: SimpleCookie = SimpleCookie()
        with suppress(CookieError):
            cookies.load(self.headers.get("Cookie", ""))
        tokens = [query.get("token", ""), cookies[self.server.cookie].value if self.server.cookie in cookies else ""]
        return any(hmac.compare_digest(one.encode(), self.server.token.encode()) for one in tokens)

    def _send(self, code: int, kind: str, body: bytes, *, encoding: str = "", cache: str = "no-store") -> None:
        self.send_response(code)
        headers: dict[str, Any] = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body), "Cache-Control": cache,
            "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        if encoding:
            headers["Content-Encoding"] = encoding
        if code == 200:
            headers["Set-Cookie"] = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a line per request would fill the terminal."""
