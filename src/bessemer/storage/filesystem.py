"""Local files and object stores (s3://, gs://, hf://datasets/), accessed through Arrow's file systems.

Arrow retries failed requests. Credentials come from the environment, profile or machine role. URLs with credentials are
rejected, because the recipe is copied into the run directory.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated, Any, BinaryIO, cast
from urllib.parse import urlsplit

from pydantic import PlainSerializer, PlainValidator

from bessemer.common import errors
from bessemer.common.errors import BessemerError, InputError, first_line, require_import
from bessemer.recipe import Source

SCHEMES = ("s3://", "gs://", "hf://")

READ_BYTES = 4 << 20  # bytes fetched from an object store at a time
PIECE_BYTES = 128 << 10  # bytes fetched at a time from files that are read in small parts
# Bytes read from a local file at a time; Python's default of 8 kB is shorter than many lines of JSON
LINE_BYTES = 256 << 10
CONNECT_SECONDS, REQUEST_SECONDS = 10, 60  # timeouts of requests to object stores, before they are retried
ATTEMPTS = 8  # per s3:// request, which takes about a minute; gs:// retries for REQUEST_SECONDS
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|bucket does not exist", re.IGNORECASE)
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT|"
    r"REQUEST_TIME_TOO_SKEWED|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED"
)
_SECRETS = re.compile(r"(AWS_\w*(KEY|TOKEN)\w*|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|GOOGLE_\w*(KEY|TOKEN)\w*)")
_WILDCARDS = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class AccessError(BessemerError):
    """An error for storage that cannot be used: the bucket does not exist, or access is denied."""


class StorePath(PurePosixPath):
    """A file or folder of an object store, such as s3://BUCKET/KEY.

    A written file appears as a whole, and folders exist only as prefixes of files. Methods raise FileNotFoundError, and
    BessemerError if the store fails.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def exists(self) -> bool:
        """Return True if the file exists, or any file below it."""
        from pyarrow import fs

        with located(self) as (files, key):
            return bool(files.get_file_info(key).type != fs.FileType.NotFound)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading bytes; a small file is fetched whole at once."""
        file = open_file(str(self), buffer_bytes=PIECE_BYTES)
        size = file.seek(0, 2)
        file.seek(0)
        return file if size > PIECE_BYTES else io.BytesIO(file.read())

    def read_bytes(self) -> bytes:
        with located(self) as (files, key), files.open_input_stream(key) as stream:
            return bytes(stream.read())

    def write_bytes(self, data: bytes) -> int:
        with located(self) as (files, key), files.open_output_stream(key) as stream:
            stream.write(data)
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        with suppress(FileNotFoundError) if missing_ok else nullcontext(), located(self) as (files, key):
            files.delete_file(key)


def parse_path(text: str | PurePath) -> AnyPath:
    """Convert text to a path: a StorePath for the URL of an object store, else a local Path, with ~ expanded."""
    return StorePath(text) if is_remote(str(text)) else Path(text).expanduser()


# A local or remote file or folder
AnyPath = Annotated[Path | StorePath, PlainValidator(parse_path), PlainSerializer(str)]


def is_remote(path: str) -> bool:
    """Return True if this is a URL of an object store."""
    return path.startswith(SCHEMES)


def check_url(url: str, where: str) -> None:
    """Raise InputError for a URL without a bucket; `where` names the URL's origin in the error."""
    parts = urlsplit(url)
    if not parts.netloc or (parts.scheme == "hf" and parts.netloc != "datasets"):
        form = "hf://datasets/OWNER/NAME/PATH" if parts.scheme == "hf" else f"{parts.scheme}://BUCKET/PATH"
        raise InputError(f"{where}: {url}: write {form}")


def entries(url: str, source: Source) -> Iterator[tuple[str, int, int, str]]:
    """Yield URL, size in bytes, modification time in ns and hash ("" if none) of the files that a URL names.

    The URL names one file, all files below a folder, or those matching a glob (`*` within a folder, `**` across folders).
    Raises OSError if the store fails or the path does not exist.
    """
    from pyarrow import fs

    files, path = arrow_location(url, source)
    scheme, path = url.partition("://")[0], path.rstrip("/")
    folder = "/".join(takewhile(lambda part: not {"*", "?"} & set(part), path.split("/")))
    infos = [files.get_file_info(folder)]
    if not infos[0].is_file:
        infos = files.get_file_info(fs.FileSelector(folder, recursive=True))
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", "**" if folder == path else path)
    pattern = re.compile("".join(_WILDCARDS.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)
    for info in infos:
        if info.is_file and pattern.fullmatch(info.path):
            etag = str(files.handler.fs.info(info.path).get("blob_id") or "") if scheme == "hf" else ""
            yield f"{scheme}://{info.path}", info.size or 0, info.mtime_ns or 0, etag


def version(path: str | AnyPath, source: Source | None = None) -> tuple[int, int]:
    """Return the current size in bytes and modification time in ns of a file. Raises the errors of `open_file`."""
    if not is_remote(str(path)):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    with located(path, source) as (files, inner):
        info = files.get_file_info(inner)
        if not info.is_file:
            raise FileNotFoundError
        return info.size or 0, info.mtime_ns or 0


def open_file(path: str, source: Source | None = None, buffer_bytes: int = 0) -> BinaryIO:
    """Open a file as a seekable stream of bytes; `buffer_bytes` (0: READ_BYTES) are read from a store at a time.

    Raises FileNotFoundError for a missing file and OSError for local failures. A store that fails after its retries raises
    BessemerError, so that no document is rejected for it.
    """
    if not is_remote(path):
        return open(path, "rb", buffering=LINE_BYTES)
    with located(path, source) as (files, inner):
        remote = _RemoteFile(path, files.open_input_file(inner))
        return cast(BinaryIO, io.BufferedReader(remote, buffer_bytes or READ_BYTES))


def arrow_location(path: str | AnyPath, source: Source | None = None) -> tuple[Any, str]:
    """Return Arrow's file system for a path or URL, and the path within it.

    A store is accessed with the endpoint that `source` sets, anonymously if it says so; else as the environment variables
    say. Raises InputError if a required library is missing.
    """
    from pyarrow import fs

    if not is_remote(str(path)):
        return fs.LocalFileSystem(), str(path)
    scheme, _, inner = str(path).partition("://")
    is_anonymous, endpoint = (source.anonymous, source.endpoint) if source else (False, None)
    if endpoint is None and scheme == "s3":  # the variables of Amazon's tools
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return arrow_filesystem(scheme, is_anonymous, endpoint), inner


@contextmanager
def located(path: str | AnyPath, source: Source | None = None) -> Iterator[tuple[Any, str]]:
    """Yield what `arrow_location` returns, with the errors of `store_errors` within the block."""
    with store_errors(path):
        yield arrow_location(path, source)


@contextmanager
def store_errors(path: object) -> Iterator[None]:
    """Turn failures of an object store in the block into a BessemerError that names `path`.

    FileNotFoundError, and errors of local files, which have an errno, pass through.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file", str(path)) from None
    except (OSError, ValueError) as error:  # Arrow raises ValueError for unsupported operations
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise failure(path, error) from None


def failure(path: object, error: BaseException) -> BessemerError:
    """Return the BessemerError to raise for `error`, a failed access to `path` in an object store."""
    failed = f"{path}: the object store failed: {redact(error)}; "
    if _NO_BUCKET.search(str(error)):
        return AccessError(f"{failed}the bucket does not exist: create it, or correct its name or AWS_ENDPOINT_URL")
    if _DENIED.search(str(error)):
        return AccessError(f"{failed}check the credentials, which must allow reading and writing, and AWS_ENDPOINT_URL")
    return BessemerError(f"{failed}check AWS_ENDPOINT_URL; rerun the command to resume once the store responds")


def redact(error: BaseException) -> str:
    """Return the first line of an error without credentials (also those in the environment) and URL signatures."""
    message = first_line(error).rstrip(" ;:,")
    for name, value in os.environ.items():
        if _SECRETS.fullmatch(name) and len(value) > 3:
            message = message.replace(value, "***")
    return errors.redact(message)[:300]


class _RemoteFile(io.RawIOBase):
    """A file of an object store as a raw Python stream, whose failures are BessemerErrors."""

    def __init__(self, path: str, file: Any) -> None:
        super().__init__()
        self._path, self._file = path, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with store_errors(self._path):
            return int(self._file.readinto(buffer))

    def seek(self, offset: int, whence: int = 0) -> int:
        size = self._file.size()
        target = min(max(offset + (0, self._file.tell(), size)[whence], 0), size)
        self._file.seek(target)
        return int(target)


def require_writable(key: str, path: AnyPath) -> None:
    """Raise InputError, which names the recipe's `key`, if no file can be created in `path` or its nearest existing parent.

    Raises BessemerError if a store does not respond.
    """
    there = path if isinstance(path, StorePath) else next(one for one in (path, *path.parents) if one.exists())
    try:
        (there / ".writable").write_bytes(b"1")
        (there / ".writable").unlink(missing_ok=True)
    except (AccessError, OSError) as error:
        raise InputError(f"{key}: {path}: {there} cannot be written ({redact(error)}); choose another folder") from None


@cache
def arrow_filesystem(scheme: str, anonymous: bool, endpoint: str | None) -> Any:
    """Return Arrow's file system for a scheme. Raises InputError if a required library is missing."""
    from pyarrow import fs

    where: dict[str, str] = {}
    if endpoint:
        where["scheme"], _, where["endpoint_override"] = endpoint.partition("://")
    if scheme == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region or endpoint:
            where["region"] = region or "us-east-1"
        retry = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
        times = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS}
        # With delayed opening, a small file takes one request.
        return fs.S3FileSystem(anonymous=anonymous, retry_strategy=retry, allow_delayed_open=True, **times, **where)
    if scheme == "gs":
        return fs.GcsFileSystem(anonymous=anonymous, retry_time_limit=timedelta(seconds=REQUEST_SECONDS), **where)
    with require_import("hf://: huggingface_hub is not installed; pip install huggingface_hub"):
        from huggingface_hub import HfFileSystem
    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))
