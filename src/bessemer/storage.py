"""Local files and object stores (s3://, gs://, hf://datasets/), listed and opened alike.

Stores are read through Arrow, which lists sizes and times and reads ranges. Credentials come from the environment,
profile or machine role; URLs with credentials are refused, since the recipe is copied into the run folder.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Source

SCHEMES = ("s3://", "gs://", "hf://")
OWN = "work+"  # before the URL of a file that this program wrote: it is read with the environment's credentials, not the source's

READ_BYTES = 4 << 20  # bytes fetched from an object store at a time
COPIED_BYTES = 4 << 20  # copied at a time
# bytes read from a local file at a time: lines of JSON are longer than the 8 kB that Python would read
LINE_BYTES = 256 << 10
CONNECT_SECONDS, REQUEST_SECONDS = 10, 60  # timeouts of requests to object stores, before they are retried
_SECRETS = re.compile(r"(AWS_\w*(KEY|TOKEN)\w*|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|GOOGLE_\w*(KEY|TOKEN)\w*)")
_SIGNED = re.compile(r"(https?://[^\s?'\"]{1,2000})\?[^\s'\"]{0,4000}")
_WILDCARDS = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def is_remote(path: str) -> bool:
    """Whether this is a URL of an object store."""
    return path.startswith(SCHEMES)


def check_url(url: str, where: str) -> None:
    """Raise InputError for a URL that carries credentials or options, or names no bucket."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise InputError(
            f"{where}: a URL of {parts.scheme}:// that carries credentials; leave them out: they are taken from the "
            "environment, the profile or the machine's role, and never from the recipe"
        )
    if not parts.netloc or (parts.scheme == "hf" and parts.netloc != "datasets"):
        form = "hf://datasets/OWNER/NAME/PATH" if parts.scheme == "hf" else f"{parts.scheme}://BUCKET/PATH"
        raise InputError(f"{where}: {url}: write {form}")


def entries(url: str, source: Source) -> Iterator[tuple[str, int, int, str]]:
    """URL, size in bytes, time of change (ns) and hash ("" for none) of the files that a URL names: one file, all below
    a folder, or those that match a glob (`*` within a folder, `**` across). OSError when the store does not answer."""
    from pyarrow import fs

    files, path = filesystem(url, source)
    scheme = url.partition("://")[0]
    parts = path.split("/")
    wild = next((number for number, part in enumerate(parts) if "*" in part or "?" in part), None)
    if wild is None:
        named = files.get_file_info(path.rstrip("/"))
        found = [named]
        if named.type != fs.FileType.File:
            found = files.get_file_info(fs.FileSelector(path.rstrip("/"), recursive=True, allow_not_found=True))
    else:
        pieces = re.split(r"(\*\*/|\*\*|\*|\?)", path)
        pattern = re.compile("".join(_WILDCARDS.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)
        below = fs.FileSelector("/".join(parts[:wild]), recursive=True, allow_not_found=True)
        found = [info for info in files.get_file_info(below) if pattern.fullmatch(info.path)]
    for info in found:
        if info.type == fs.FileType.File:
            etag = str(files.handler.fs.info(info.path).get("blob_id") or "") if scheme == "hf" else ""
            yield f"{scheme}://{info.path}", info.size or 0, info.mtime_ns or 0, etag


def version(path: str, source: Source) -> tuple[int, int]:
    """Size in bytes and time of change (ns) as they are now. Raises as `open_file` does."""
    if not is_remote(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    from pyarrow import fs

    files, inner = filesystem(path, source)
    try:
        info = files.get_file_info(inner)
    except OSError as error:
        raise failure(path, error) from None
    if info.type != fs.FileType.File:
        raise FileNotFoundError(2, "No such file in the store", path)
    return info.size or 0, info.mtime_ns or 0


def open_file(path: str, source: Source) -> BinaryIO:
    """A seekable stream of bytes. FileNotFoundError for what is not there; OSError for local trouble; a store
    that fails after its retries raises BessemerError, since that says nothing about the documents."""
    if path.startswith(OWN):
        return open_remote(path, *open_filesystem(path.removeprefix(OWN)), READ_BYTES)
    if not is_remote(path):
        return open(path, "rb", buffering=LINE_BYTES)
    return open_remote(path, *filesystem(path, source), READ_BYTES)


def open_remote(path: str, files: Any, inner: str, buffer_bytes: int) -> BinaryIO:
    """A file of Arrow's file system as a seekable stream. path: its URL, for errors, which are as of `answering`."""
    with answering(path):
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(path, files.open_input_file(inner)), buffer_bytes))


@contextmanager
def answering(path: str) -> Iterator[None]:
    """FileNotFoundError passes; other failures of a store are BessemerErrors. ValueError: Arrow's for what it cannot do."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file in the store", path) from None
    except (OSError, ValueError) as error:
        raise failure(path, error) from None


def failure(path: str, error: BaseException) -> BessemerError:
    """The error for a store that does not answer."""
    return BessemerError(
        f"corpus: {path}: the object store failed: {redacted(error)}; run the command again once it answers"
    )


def redacted(error: BaseException) -> str:
    """The first line of an error without credentials and signed parts of URLs."""
    message = (str(error).splitlines() or [type(error).__name__])[0]
    for name, value in os.environ.items():
        if _SECRETS.fullmatch(name) and len(value) > 3:
            message = message.replace(value, "***")
    return _SIGNED.sub(r"\1?***", message)[:300]


class _RemoteFile(io.RawIOBase):
    """A file of an object store as Python's raw stream, whose failures are BessemerErrors."""

    def __init__(self, path: str, file: Any) -> None:
        super().__init__()
        self._path, self._file = path, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._file.readinto(buffer))
        except OSError as error:
            raise failure(self._path, error) from None

    def seek(self, offset: int, whence: int = 0) -> int:
        size = self._file.size()
        target = offset + (0, self._file.tell(), size)[whence]
        self._file.seek(min(max(target, 0), size))
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def put_file(source: Path, place: str, on_block: Callable[[bytes], object] | None = None) -> None:
    """Copy a local file to a local folder or a store, and check that all of it arrived. on_block: called with what is copied.
    Raises OSError, BessemerError."""
    files, target = open_filesystem(place)
    size = 0
    with open(source, "rb", buffering=0) as file, files.open_output_stream(target) as stream:
        while block := file.read(COPIED_BYTES):
            stream.write(block)
            if on_block is not None:
                on_block(block)
            size += len(block)
    if (there := files.get_file_info(target).size) != size:
        raise BessemerError(f"{place}: {there} bytes arrived of {size}")


def filesystem(url: str, source: Source) -> tuple[Any, str]:
    """Arrow's file system for a URL, and the path in it. InputError when a library for it is not installed."""
    scheme, _, path = url.partition("://")
    return arrow_filesystem(scheme, source.anonymous, source.endpoint or environment_endpoint(scheme)), path


def environment_endpoint(scheme: str) -> str | None:
    """The address that the environment has for the stores of a scheme, as Amazon's tools read it; None: the provider's own."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint if scheme == "s3" else None


def open_filesystem(place: str) -> tuple[Any, str]:
    """Arrow's file system of a local folder or a URL (s3://, gs://), with the environment's credentials and endpoint, and its
    path there."""
    from pyarrow import fs

    if not is_remote(place):
        return fs.LocalFileSystem(), os.path.expanduser(place)
    scheme, _, path = place.partition("://")
    return arrow_filesystem(scheme, False, environment_endpoint(scheme)), path


def make_folder(place: str) -> None:
    """Make a folder and those above it; in a store there is nothing to make. Raises OSError."""
    if not is_remote(place):
        os.makedirs(os.path.expanduser(place), exist_ok=True)


def remove_folder(place: str) -> None:
    """Remove a folder whose files are deleted; in a store there is nothing to remove. Raises OSError."""
    if not is_remote(place):
        shutil.rmtree(os.path.expanduser(place))


def require_writable(place: str) -> None:
    """Raise OSError or BessemerError where no file can be made in a folder, or in the one in which it would be made."""
    files, path = open_filesystem(place)
    if is_remote(place):
        with files.open_output_stream(f"{path}/.writable"):
            pass
        files.delete_file(f"{path}/.writable")
        return
    there = next(one for one in (Path(path), *Path(path).parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BessemerError(f"{place}: {there} cannot be written ({error.strerror})") from None


@cache
def arrow_filesystem(scheme: str, anonymous: bool, endpoint: str | None) -> Any:
    """Arrow's file system for the URLs of a scheme. InputError when a library for it is not installed."""
    from pyarrow import fs

    where: dict[str, str] = {}
    if endpoint:
        where["scheme"], _, where["endpoint_override"] = endpoint.partition("://")
    if scheme == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region or endpoint:
            where["region"] = region or "us-east-1"
        times = {"connect_timeout": CONNECT_SECONDS, "request_timeout": REQUEST_SECONDS}
        return fs.S3FileSystem(anonymous=anonymous, **times, **where)
    if scheme == "gs":
        retry = timedelta(seconds=REQUEST_SECONDS)
        return fs.GcsFileSystem(anonymous=anonymous, retry_time_limit=retry, **where)
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise InputError("hf://: huggingface_hub is not installed; pip install huggingface_hub") from None
    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))
