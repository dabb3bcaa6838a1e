"""A local object store: the requests of S3 and of Google's store needed for reading, and those of S3 for writing."""

from __future__ import annotations

import argparse
import io
import json
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

TEMPORARY = ".being-written"
DENIED = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
NO_BUCKET = (
    "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>",
    '{"error": {"code": 404, "message": "The specified bucket does not exist."}}',
)
TIME = "2024-05-06T07:08:09.000Z"


class Server(ThreadingHTTPServer):
    """HTTP server that serves the files of a folder as objects "bucket/key". The subfolders are the only buckets."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.parts: dict[str, dict[int, bytes]] = {}  # parts of unfinished uploads

    @property
    def objects(self) -> dict[str, Path]:
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.endswith(TEMPORARY))
        return {path.relative_to(self.folder).as_posix(): path for path in files}

    def find(self, name: str) -> Path | None:
        return path if (path := self.folder / name).is_file() else None

    @property
    def failure(self) -> int:
        """Status code for every request; 0 for normal answers."""
        place = self.folder.with_suffix(".status")
        return int(place.read_text()) if place.exists() else 0


def joined(file: BinaryIO) -> bytes:
    """Return the body of a chunked request, in chunks of HTTP or signed chunks of S3."""
    body = b""
    while size := int(file.readline().split(b";")[0], 16):
        body += file.read(size)
        file.readline()
    file.readline()
    return body


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise an answer takes 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def parse_request(self) -> bool:
        """Answer with the status of a failing store, and with 404 for a missing bucket."""
        if not super().parse_request():
            return False
        path = unquote(urlsplit(self.path).path).strip("/")
        is_google = path.startswith("storage/v1/b/")
        bucket = path.removeprefix("storage/v1/b/").partition("/")[0]
        status = self.server.failure or (404 if bucket and not (self.server.folder / bucket).is_dir() else 0)
        if status:
            self.close_connection = True
            body = {500: "", 403: DENIED, 404: NO_BUCKET[is_google]}[status]
            self._answer(status, body.encode(), "application/json" if is_google else "application/xml")
        return not status

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, query, _ = self._sent()
        with open(self.server.log, "a") as log:
            log.write(
                f"{self.command} {self.path} {self.headers.get('Range', '')} {self.headers.get('Authorization', '')}\n"
            )
        if path.startswith("storage/v1/b/"):
            self._google(path.removeprefix("storage/v1/b/"), query)
        elif "list-type" in query:
            self._list(path, query)
        else:
            self._object(path)

    def do_PUT(self) -> None:
        """Store an object, or a part of one."""
        path, query, body = self._sent()
        if source := self.headers.get("x-amz-copy-source"):
            found = self.server.find(unquote(source).strip("/"))
            if found is None:
                self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>", "application/xml")
                return
            self._keep(path, found.read_bytes())
            body = f"<CopyObjectResult><ETag>&quot;e&quot;</ETag><LastModified>{TIME}</LastModified></CopyObjectResult>"
            self._answer(200, body.encode(), "application/xml")
        elif "uploadId" in query:
            self.server.parts.setdefault(query["uploadId"], {})[int(query["partNumber"])] = body
            self._answer(200, b"", "application/xml")
        else:
            self._keep(path, body)
            self._answer(200, b"", "application/xml")

    def do_POST(self) -> None:
        """Begin or complete a multipart upload."""
        path, query, body = self._sent()
        if "delete" in query:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                if found := self.server.find(f"{path}/{unescape(key)}"):
                    found.unlink(missing_ok=True)
            self._answer(200, b"<DeleteResult></DeleteResult>", "application/xml")
        elif "uploads" in query:
            bucket, _, key = path.partition("/")
            identity = secrets.token_hex(8)
            self.server.parts[identity] = {}
            answer = (
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{identity}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
            self._answer(200, answer.encode(), "application/xml")
        else:
            parts = self.server.parts.pop(query["uploadId"])
            self._keep(path, b"".join(parts[number] for number in sorted(parts)))
            self._answer(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>", "application/xml")

    def do_DELETE(self) -> None:
        path, _, _ = self._sent()
        if found := self.server.find(path):  # and not the marker of a folder
            found.unlink(missing_ok=True)
        self._answer(204, b"", "application/xml")

    def _sent(self) -> tuple[str, dict[str, str], bytes]:
        """Return path, query and body of a request."""
        place = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(place.query, keep_blank_values=True).items()}
        is_chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = joined(self.rfile) if is_chunked else self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = joined(io.BytesIO(body))
        return unquote(place.path).strip("/"), query, body

    def _keep(self, path: str, body: bytes) -> None:
        target = self.server.folder / path
        if self.path.partition("?")[0].endswith("/"):  # the marker of a folder
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{threading.get_ident()}{TEMPORARY}")
        temporary.write_bytes(body)
        temporary.replace(target)

    def _object(self, path: str) -> None:
        found = self.server.find(path)
        if found is None:
            is_bucket = "/" not in path and (self.server.folder / path).is_dir()
            self._answer(200 if path and is_bucket else 404, b"", "application/xml")
            return
        data = found.read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            extra = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
            self._answer(206, data[start : end + 1], "application/octet-stream", extra)
        else:
            self._answer(200, data, "application/octet-stream")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, common = "", set()
        objects = self.server.objects
        for name in sorted(objects):
            key = name.partition("/")[2]
            if name.partition("/")[0] != bucket or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                common.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            size = objects[name].stat().st_size
            contents += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{TIME}</LastModified><ETag>&quot;e&quot;</ETag>"
                f"<Size>{size}</Size></Contents>"
            )
        folders = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(common))
        body = (
            f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>'
            f"<IsTruncated>false</IsTruncated><KeyCount>{contents.count('<Key>') + len(common)}</KeyCount>{contents}{folders}"
            "</ListBucketResult>"
        )
        self._answer(200, body.encode(), "application/xml")

    def _google(self, path: str, query: dict[str, str]) -> None:
        bucket, _, rest = path.partition("/o")
        name = rest.strip("/")
        if not name:
            prefix = query.get("prefix", "")
            found = [one for one in sorted(self.server.objects) if one.startswith(f"{bucket}/{prefix}")]
            items = [self._about(bucket, one.partition("/")[2]) for one in found]
            self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode(), "application/json")
        elif f"{bucket}/{name}" not in self.server.objects:
            self._answer(404, b'{"error": {"code": 404, "message": "not found"}}', "application/json")
        elif query.get("alt") == "media":
            self._object(f"{bucket}/{name}")
        else:
            self._answer(200, json.dumps(self._about(bucket, name)).encode(), "application/json")

    def _about(self, bucket: str, key: str) -> dict[str, str]:
        size = str(self.server.objects[f"{bucket}/{key}"].stat().st_size)
        about = {"kind": "storage#object", "id": key, "name": key, "bucket": bucket, "size": size, "generation": "1"}
        return {**about, "metageneration": "1", "updated": TIME, "timeCreated": TIME, "etag": "e"}

    def _answer(self, status: int, body: bytes, kind: str, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        length = len(body)
        if self.command == "HEAD" and status == 200:
            found = self.server.find(unquote(urlsplit(self.path).path).strip("/"))
            length = len(body) if found is None else found.stat().st_size
        headers = {"Content-Type": kind, "Content-Length": str(length), "ETag": '"e"'}
        headers["Last-Modified"] = "Mon, 06 May 2024 07:08:09 GMT"
        for name, value in {**headers, **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@dataclass(frozen=True)
class Store:
    """A running store in a separate process, because Arrow's client for Google's store blocks Python."""

    endpoint: str
    folder: Path
    """Folder of the stored objects, as bucket/key."""

    def requests(self) -> list[str]:
        """Return a line for each request so far: method, path, range, authorization."""
        return self.folder.with_suffix(".log").read_text().splitlines()

    def refuse(self) -> None:
        """Answer every request with 403 from now on."""
        self._answer_with("403")

    def fail(self) -> None:
        """Answer every request with 500 from now on."""
        self._answer_with("500")

    def answer(self) -> None:
        """Answer normally again after `refuse` and `fail`."""
        self._answer_with("0")

    def _answer_with(self, status: str) -> None:
        temporary = self.folder.with_suffix(".new")
        temporary.write_text(status)
        temporary.replace(self.folder.with_suffix(".status"))


@contextmanager
def store(folder: Path) -> Iterator[Store]:
    """Serve a folder while the block runs."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Store(process.stdout.readline().strip(), folder)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a folder as an object store; its folders are the buckets.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0, help="left out: a free one")
    chosen = parser.parse_args()
    if not chosen.folder.is_dir():
        parser.error(f"{chosen.folder}: no such folder")
    server = Server(chosen.folder, chosen.port)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
