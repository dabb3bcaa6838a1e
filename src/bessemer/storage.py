"""Local files and object stores (s3://, gs://, hf://datasets/), listed and opened alike.

Stores are read through Arrow, which lists sizes and times and reads ranges. Credentials come from the environment,
profile or machine role; URLs with credentials are refused, since the recipe is copied into the run folder.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from bessemer import errors, interrupt
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Source
from bessemer.recipe.secrets import require_no_credentials
from bessemer.terminal import warn

SCHEMES = ("s3://", "gs://", "hf://")
OWN = "work+"  # before the URL of a file that this program wrote: it is read with the environment's credentials, not the source's

READ_BYTES = 4 << 20  # bytes fetched from an object store at a time
COPIED_BYTES = 4 << 20  # copied at a time
# bytes read from a local file at a time: lines of JSON are longer than the 8 kB that Python would read
LINE_BYTES = 256 << 10
CONNECT_SECONDS, REQUEST_SECONDS = 10, 60  # timeouts of requests to object stores, before they are retried
PATIENCE_SECONDS = 300.0  # that a training, and the stages of corpus and tokens, wait for a store that does not answer
MAX_WAIT_SECONDS = 30.0  # between two requests to it
OUTAGE_GAP_SECONDS = 10.0  # a request that fails so soon after others were answered again belongs to the same outage
# What a store says of requests that it would refuse again: of a bucket that is not there, of credentials, of others.
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|bucket does not exist", re.IGNORECASE)
_WITHOUT_BUCKET = "create it, or correct its name or the address of the store (AWS_ENDPOINT_URL)"
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT|"
    r"REQUEST_TIME_TOO_SKEWED|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED"
)
_REFUSED = re.compile(
    r"AWS Error (INVALID|MISSING|NO_SUCH|MALFORMED|VALIDATION)_?|HTTP status (3|4(?!08|29))\d\d|INVALID_ARGUMENT"
)
_SECRETS = re.compile(r"(AWS_\w*(KEY|TOKEN)\w*|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|GOOGLE_\w*(KEY|TOKEN)\w*)")
_WILDCARDS = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


Answer = TypeVar("Answer")


class StoreError(BessemerError):
    """An object store failed. is_passing: the same request may be answered later, and has not been waited for."""

    is_passing = False


def is_remote(path: str) -> bool:
    """Whether this is a URL of an object store."""
    return path.startswith(SCHEMES)


def check_url(url: str, where: str) -> None:
    """Raise InputError for a URL that carries credentials or options, or names no bucket."""
    parts = urlsplit(url)
    require_no_credentials(url, where)
    if not parts.netloc or (parts.scheme == "hf" and parts.netloc != "datasets"):
        form = "hf://datasets/OWNER/NAME/PATH" if parts.scheme == "hf" else f"{parts.scheme}://BUCKET/PATH"
        raise InputError(f"{where}: {url}: write {form}")


def require_bucket(url: str, where: str, source: Source | None = None) -> None:
    """Raise InputError where the store says that the bucket of a URL is not there. source: whose URL it is."""
    from pyarrow import fs

    files, path = open_filesystem(url) if source is None else filesystem(url, source)
    scheme, bucket = url.partition("://")[0], path.partition("/")[0]
    if scheme == "hf" or "*" in bucket or "?" in bucket:
        return
    try:
        is_there = asked(url, lambda: files.get_file_info(bucket)).type != fs.FileType.NotFound
    except OSError as error:  # one that may not be asked is no bucket that is not there
        is_there = _NO_BUCKET.search(str(error)) is None
    if not is_there:
        raise InputError(f"{where}: {url}: the store has no bucket {bucket!r}; {_WITHOUT_BUCKET}")


def entries(url: str, source: Source) -> Iterator[tuple[str, int, int, str]]:
    """URL, size in bytes, time of change (ns) and hash ("" for none) of the files that a URL names: one file, all below
    a folder, or those that match a glob (`*` within a folder, `**` across). OSError when the store does not answer."""
    from pyarrow import fs

    files, path = filesystem(url, source)
    scheme = url.partition("://")[0]
    parts = path.split("/")
    wild = next((number for number, part in enumerate(parts) if "*" in part or "?" in part), None)
    if wild is None:
        named = asked(url, lambda: files.get_file_info(path.rstrip("/")))
        found = [named]
        if named.type != fs.FileType.File:
            below = fs.FileSelector(path.rstrip("/"), recursive=True, allow_not_found=True)
            found = asked(url, lambda: files.get_file_info(below))
    else:
        pieces = re.split(r"(\*\*/|\*\*|\*|\?)", path)
        pattern = re.compile("".join(_WILDCARDS.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)
        below = fs.FileSelector("/".join(parts[:wild]), recursive=True, allow_not_found=True)
        found = [info for info in asked(url, lambda: files.get_file_info(below)) if pattern.fullmatch(info.path)]
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
    with answering(path):
        info = asked(path, lambda: files.get_file_info(inner))
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
        file = asked(path, lambda: files.open_input_file(inner))
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(path, file), buffer_bytes))


@contextmanager
def answering(path: str) -> Iterator[None]:
    """FileNotFoundError passes; other failures of a store are BessemerErrors. ValueError: Arrow's for what it cannot do."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such file in the store", path) from None
    except (OSError, ValueError) as error:
        raise failure(path, error) from None


@contextmanager
def requiring_answer(key: str) -> Iterator[None]:
    """Raise InputError, with what to check, where a store that a key of the recipe names refuses."""
    try:
        yield
    except BessemerError as error:
        why = str(error).removeprefix("corpus: ")
        raise InputError(f"{key}: {why}") from None


def failure(path: str, error: BaseException, waited: str = "") -> StoreError:
    """The error for a store that does not answer, or refuses. waited: how long it was asked again."""
    failed = StoreError(f"corpus: {path}: the object store failed{waited}: {redacted(error)}; {_advice(error)}")
    failed.is_passing = not waited and _is_passing(error)
    return failed


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may be answered later. Errors of Arrow have no number, those of this machine's files have."""
    if isinstance(error, StoreError):
        return error.is_passing
    is_of_store = isinstance(error, OSError) and error.errno is None
    return is_of_store and not any(refusal.search(str(error)) for refusal in (_NO_BUCKET, _DENIED, _REFUSED))


def _advice(error: BaseException) -> str:
    """What to do about a failure of a store."""
    if _is_passing(error):
        return "run the command again once it answers"
    if _NO_BUCKET.search(str(error)):
        return f"there is no such bucket: {_WITHOUT_BUCKET}"
    if _DENIED.search(str(error)):
        return (
            f"{missing_credentials() or ''}check the credentials (AWS_ACCESS_KEY_ID, a profile, the machine's role; for gs:// "
            "application-default ones), that they allow to read, list, write and delete there, and AWS_ENDPOINT_URL"
        )
    return "check the URL and the address of the store (AWS_ENDPOINT_URL)"


def missing_credentials() -> str:
    """That no credentials for s3:// were found, as the beginning of an advice; "" where there are some."""
    named = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN")
    container = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    kept = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    if any(map(os.environ.get, (*named, *container))) or any(Path(path).expanduser().exists() for path in kept):
        return ""
    return "no credentials were found (AWS_ACCESS_KEY_ID is not set, there is no profile), unless this machine has a role: "


_patient = Counter[str]()  # of stages that may wait, in this process
_waiting = Counter[str]()  # requests that wait, by store
_answered: dict[str, float] = {}  # when the last of them had its answer, by time.monotonic
_waiting_lock = threading.Lock()


@contextmanager
def patient() -> Iterator[None]:
    """Within it this process waits for stores that do not answer (`asked`)."""
    _patient["stages"] += 1
    try:
        yield
    finally:
        _patient["stages"] -= 1


def asked(place: str, ask: Callable[[], Answer], is_patient: bool = False) -> Answer:
    """The answer to a request to the store of a URL. Raises what the request raises.

    A store that does not answer is asked again for PATIENCE_SECONDS, within `patient` or where `is_patient`; one warning is for
    all requests of this process that wait for it meanwhile. What a store refuses is raised at once.
    """
    last, wait = 0.0, 1.0
    store = "/".join(place.removeprefix(OWN).split("/")[:3])
    try:
        while True:
            try:
                return ask()
            except FileNotFoundError:
                raise
            except (OSError, StoreError) as error:
                if not (is_patient or _patient["stages"]) or not _is_passing(error):
                    raise
                if not last:
                    last = monotonic() + PATIENCE_SECONDS
                    _begin_waiting(store, error)
                if monotonic() + wait > last:
                    raise failure(place, error, f" for {PATIENCE_SECONDS:.0f} s") from None
            until = monotonic() + wait
            while (left := until - monotonic()) > 0:
                interrupt.check()
                sleep(min(left, 0.5))
            wait = min(2 * wait, MAX_WAIT_SECONDS)
    finally:
        if last:
            with _waiting_lock:
                _waiting[store] -= 1
                _answered[store] = monotonic()


def _begin_waiting(store: str, error: BaseException) -> None:
    with _waiting_lock:
        is_first = not _waiting[store] and monotonic() - _answered.get(store, -OUTAGE_GAP_SECONDS) >= OUTAGE_GAP_SECONDS
        _waiting[store] += 1
    if is_first:
        warn(
            f"{store} does not answer ({redacted(error)}); asking it again for up to {PATIENCE_SECONDS / 60:.0f} minutes"
        )


def redacted(error: BaseException) -> str:
    """The first line of an error without credentials, those of the environment too, and signed parts of URLs."""
    message = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" ;:,").removeprefix("corpus: ")
    for name, value in os.environ.items():
        if _SECRETS.fullmatch(name) and len(value) > 3:
            message = message.replace(value, "***")
    return errors.redacted(message)[:300]


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
        with answering(self._path):
            return int(asked(self._path, lambda: self._file.readinto(buffer)))

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
        hint = missing_credentials() if place.startswith("s3://") else ""
        raise BessemerError(f"{place}: {there} bytes arrived of {size}{hint and f'; {hint}set them, or a profile'}")


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


def require_writable(place: str) -> None:
    """Raise OSError or BessemerError where no file can be made in a folder, or in the one in which it would be made."""
    files, path = open_filesystem(place)
    if is_remote(place):
        with answering(place):
            asked(place, lambda: files.open_output_stream(f"{path}/.writable").close())
            asked(place, lambda: files.delete_file(f"{path}/.writable"))
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
