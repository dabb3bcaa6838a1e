"""The base class of readers, and the classes of formats by name.

This is the one place that decides which format a file has.
"""

from __future__ import annotations

import io
import lzma
import pkgutil
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from pydantic import PrivateAttr

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, first_line
from bessemer.corpus.document import Document
from bessemer.corpus.extract.webpage import check_engine
from bessemer.corpus.readers.inflate import InflatedFile, beginning, compression_of, unpacked_size, without_compression
from bessemer.recipe import Corpus, Source
from bessemer.recipe.corpus import reader_class
from bessemer.recipe.uses import ExtensionBase, built_in_classes, make
from bessemer.storage import filesystem

HEAD_BYTES = 64 << 10  # the beginning of a file that is looked at
READ_BYTES = 1 << 20  # of a compressed file, decompressed at a time
BUILT_IN = {
    name: f"bessemer.corpus.readers.formats.{name}:{name.capitalize()}Reader"
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).with_name("formats"))])
}


# What a reader raises for a damaged file; any other exception is a fault of its class
DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)


def damage_of(error: Exception) -> str:
    """Return what is wrong with a file, for the documents that it costs."""
    return getattr(error, "strerror", None) or first_line(error)[:300]


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    path: str  # where it lies: on this machine, or its URL in an object store
    name: str  # its path in the corpus: relative to what the recipe names, so that it is the same on every machine
    size: int  # bytes
    mtime_ns: int
    etag: str = ""  # a hash of the content, from stores that have one instead of a time
    is_regular: bool = True  # false for pipes, sockets and devices: reading them could wait for ever

    @property
    def stamp(self) -> str:
        """Identifies the version of the file; "" where its time is not known."""
        return stamp(self.size, self.mtime_ns) if self.mtime_ns else ""


def stamp(size: int, mtime_ns: int) -> str:
    """Identifies a version of a file."""
    return f"{size} {mtime_ns}"


@dataclass(frozen=True, slots=True)
class Part:
    """What one call of a reader reads: a file, or a part of one."""

    path: str  # of the file
    name: str  # of the file in the corpus
    format: str  # of the reader
    start: int = 0  # where it begins, in terms of the reader: a byte, a row group
    end: int | None = None  # where it ends; None: with the file
    size: int = 0  # bytes to read, for the budget and the progress bar; of compressed lines about what they unpack to
    damage: str = ""  # why it cannot be read, when that is known already
    reason: str = "bad_record"  # the reason of reasons.REASONS for that
    layout: str = ""  # of the file, in terms of the reader
    stamp: str = ""  # of the file as it was listed


@dataclass
class Context:
    """What a reader works with besides its settings."""

    source: Source
    format: str
    corpus: Corpus
    part_bytes: int = 0  # of a part of a file that can be split
    beginning_bytes: int | None = None  # of one that cannot, where a sample is read; None: all of it
    # What the beginnings of files of records show: what those without text hold, and which keys there may be
    missing: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    passed_over: Counter[str] = field(default_factory=Counter)  # records that hold no document by nature, by type


class Reader(ExtensionBase, ABC):
    """Reads the files of one format. Fields of a subclass are its settings.

    Attributes:
        suffixes: Endings of the files that are taken from a folder, in small letters.
        is_compressible: Files may be compressed, with a second ending such as .gz.
        is_guessed: Files of a source without a format are read by their ending (built-in readers only).
        is_web: Documents are web pages.
        has_fields: Documents are records, whose fields text_key and label_key name.
        has_encoding: Files may have the encoding that the source names.
        is_one_document: A file is exactly one document.
        may_hang: A document may take long: corpus.document_seconds ends it.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    is_compressible: ClassVar[bool] = True
    is_guessed: ClassVar[bool] = True
    is_web: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False
    has_encoding: ClassVar[bool] = False
    is_one_document: ClassVar[bool] = False
    may_hang: ClassVar[bool] = False

    _context: Context = PrivateAttr()

    @property
    def context(self) -> Context:
        """What it works with besides its settings."""
        return cast(Context, (self.__pydantic_private__ or {})["_context"])  # pydantic's own look-up is slow

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a file in a folder has an ending of this format."""
        return (without_compression(path) if cls.is_compressible else path).lower().endswith(cls.suffixes)

    @classmethod
    def recognises(cls, file: File) -> bool:
        """Return whether a file of a source without a format has this one."""
        return cls.is_guessed and cls.matches(file.path)

    def split(self, file: File) -> Iterable[Part]:
        """Return the parts of a file, which are read independently of each other: one, the file."""
        return [self.part(file)]

    @abstractmethod
    def read(self, part: Part) -> Iterable[Document]:
        """Yield the documents of a part. Their keys differ within a file.

        Damage costs what is behind it, and is counted as `unreadable`: OSError, ValueError, EOFError, and the errors of zipfile,
        tarfile and zlib. Any other exception is a fault of the class and stops the stage.
        """

    def part(self, file: File, start: int = 0, end: int | None = None, size: int | None = None, **more: str) -> Part:
        """Return a part of a file; `size` is about its bytes, those of the file where it is left out."""
        size = file.size if size is None else size
        return Part(file.path, file.name, self.context.format, start, end, size, stamp=file.stamp, **more)

    def _stream(self, file: File, layout: str = "") -> Part:
        """Return the part of a file that cannot be split: all of it, or its beginning where a sample is read."""
        if (end := self.context.beginning_bytes) is None:
            return self.part(file, layout=layout)
        return self.part(file, 0, end, min(end, unpacked_size(file.path, file.size)), layout=layout)

    @contextmanager
    def open(self, part: Part | File) -> Iterator[BinaryIO]:
        """Open the file of a part, here or in a store, decompressed. Reading raises Damaged where compressed data is."""
        compression = compression_of(part.path) if self.is_compressible else ""
        with filesystem.open_file(part.path, self.context.source) as file:
            packed = InflatedFile(file, compression) if compression else None
            yield file if packed is None else cast(BinaryIO, io.BufferedReader(packed, READ_BYTES))

    def head(self, part: Part | File) -> bytes:
        """Return the first HEAD_BYTES of the file of a part, decompressed; fewer where it is damaged."""
        with filesystem.open_file(part.path, self.context.source) as file:
            return beginning(file, compression_of(part.path) if self.is_compressible else "", HEAD_BYTES)


@contextmanager
def naming_faults(reader: Reader, method: str, where: str) -> Iterator[None]:
    """Raise BessemerError for a fault of a user's class, with its file, the method and `where`."""
    try:
        yield
    except (*DAMAGE, BessemerError, MemoryError):
        raise
    except Exception as error:
        if extensions.is_own(type(reader)):
            raise
        raise extensions.failure(reader, method, error, where) from error


def build_reader(source: Source, format_: str, corpus: Corpus | None = None, **more: Any) -> Reader:
    """Return the reader for files of a source. Raises InputError when the library of [corpus.extract] is not installed."""
    reader: Reader = make("readers", format_, source.reader)
    if reader.is_web and corpus is not None:
        check_engine(corpus.extract)
    reader._context = Context(source, format_, corpus or Corpus(), **more)
    return reader


def format_of(source: Source | None, file: File) -> str | None:
    """Return the format of a file: the source's, else the built-in one that recognises it; None for none."""
    return (source and source.format) or next(
        (name for name, reader in built_in_classes("readers").items() if reader.recognises(file)), None
    )


def is_wanted(source: Source, file: File) -> bool:
    """Return whether a file in a folder is read: it has one of the source's endings, else one of its format's."""
    if source.suffixes is not None:
        return file.name.lower().endswith(tuple(suffix.lower() for suffix in source.suffixes))
    if source.format is not None:
        return bool(reader_class(source.format).matches(file.path))
    return format_of(source, file) is not None
