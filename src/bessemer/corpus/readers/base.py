"""The `Reader` base class and the choice of a reader for each file.

Only this module decides which format a file has.
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

from bessemer.common.errors import BessemerError, first_line
from bessemer.corpus.document import Document
from bessemer.corpus.extract.webpage import check_engine
from bessemer.corpus.readers.inflate import InflatedFile, beginning, compression_of, unpacked_size, without_compression
from bessemer.recipe import Corpus, Source
from bessemer.recipe.corpus import reader_class
from bessemer.recipe.uses import ExtensionBase, built_in_classes, make
from bessemer.storage import filesystem

HEAD_BYTES = 64 << 10  # read from the start of a file to recognise its contents
READ_BYTES = 1 << 20  # decompressed at a time
BUILT_IN = {
    name: f"bessemer.corpus.readers.formats.{name}:{name.capitalize()}Reader"
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).with_name("formats"))])
}


# Exceptions that mean a damaged file, and all that a reader may raise. Any other exception is a bug in the reader.
DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)
MAY_RAISE = (*DAMAGE, BessemerError)


def damage_of(error: Exception) -> str:
    """Return a short description of the error that reading a damaged file raised, for the details of rejected documents."""
    return getattr(error, "strerror", None) or first_line(error)[:300]


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source as the listing found it: where it is and which version of it.

    Attributes:
        path: Path on this machine, or a URL in an object store.
        name: Path relative to the recipe's entry, which is the same on every machine.
        size: Size in bytes.
        mtime_ns: Modification time in nanoseconds; 0 if it is unknown.
        etag: Hash of the content, from object stores.
        is_regular: False for pipes, sockets and devices, where a read could block forever.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    etag: str = ""
    is_regular: bool = True

    @property
    def stamp(self) -> str:
        """Size and modification time, which identify a version of the file; "" if the time is unknown."""
        return stamp(self.size, self.mtime_ns) if self.mtime_ns else ""


def stamp(size: int, mtime_ns: int) -> str:
    """Return a string of size and modification time that identifies a version of a file."""
    return f"{size} {mtime_ns}"


@dataclass(frozen=True, slots=True)
class Part:
    """The range of a file that one call of `Reader.read` reads.

    Attributes:
        path: Path of the file.
        name: Name of the file in the corpus.
        format: Format of the reader.
        start: First unit of the part. The reader chooses the unit, such as a byte or a row group.
        end: End of the part, exclusive; None for the end of the file.
        size: Bytes to read, for the budget and the progress bar; an estimate for compressed lines.
        damage: Description of known damage; "" for none.
        reason: Reason in reasons.toml under which that damage is counted.
        layout: Layout of the file, for readers that distinguish several.
        stamp: `File.stamp` of the file when it was listed.
    """

    path: str
    name: str
    format: str
    start: int = 0
    end: int | None = None
    size: int = 0
    damage: str = ""
    reason: str = "bad_record"
    layout: str = ""
    stamp: str = ""


@dataclass
class Context:
    """The source, format and recipe that a reader works for, with its findings so far.

    Attributes:
        source: The source.
        format: Name of the format.
        corpus: The `[corpus]` table of the recipe.
        part_bytes: Target size of the parts of a file that can be split.
        beginning_bytes: Bytes to sample from a file that cannot be split; None to read all of it.
        missing: Messages on files in whose first records the text field is missing.
        keys: Keys of `text_key` that the first records of the files have.
        passed_over: Number of records of each type that never holds a document.
    """

    source: Source
    format: str
    corpus: Corpus
    part_bytes: int = 0
    beginning_bytes: int | None = None
    missing: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    passed_over: Counter[str] = field(default_factory=Counter)


class Reader(ExtensionBase, ABC):
    """A reader of the files of one format. The fields of a subclass are its settings.

    Attributes:
        suffixes: File name endings of the format, in lower case.
        is_compressible: True if files may be compressed, with a second ending such as .gz.
        is_guessed: True if files with these endings are read even when the source names no format (built-in readers only).
        is_web: True if documents are web pages.
        has_fields: True if documents are records with the fields that `text_key` and `label_key` name.
        has_encoding: True if the source may name the encoding of its files.
        may_hang: True if one document may take long to read; `corpus.document_seconds` then limits the time.
        is_stream: True if a sample reads only the beginning of a file, up to `Part.end`.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    is_compressible: ClassVar[bool] = True
    is_guessed: ClassVar[bool] = True
    is_web: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False
    has_encoding: ClassVar[bool] = False
    may_hang: ClassVar[bool] = False
    is_stream: ClassVar[bool] = False

    _context: Context = PrivateAttr()

    @property
    def context(self) -> Context:
        """The source, format and recipe that this reader reads for."""
        return cast(Context, (self.__pydantic_private__ or {})["_context"])  # pydantic's attribute access is slow

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether the name of a file has an ending of this format."""
        return (without_compression(path) if cls.is_compressible else path).lower().endswith(cls.suffixes)

    @classmethod
    def recognises(cls, file: File) -> bool:
        """Return whether this reader reads a file whose source names no format."""
        return cls.is_guessed and cls.matches(file.path)

    def split(self, file: File) -> Iterable[Part]:
        """Split a file into parts that are read independently. The default is one part, the whole file."""
        return [self._stream(file) if self.is_stream else self.part(file)]

    @abstractmethod
    def read(self, part: Part) -> Iterable[Document]:
        """Yield the documents of a part. Their keys must be unique within the file.

        If the file is damaged, raise OSError, ValueError, EOFError, or an error of zipfile, tarfile or zlib. The rest of the
        part is then lost and counted as `unreadable`. Any other exception is a bug in the class and stops the stage.
        """

    def part(self, file: File, start: int = 0, end: int | None = None, size: int | None = None, **more: str) -> Part:
        """Return a part of a file. `more` are further fields of `Part`.

        `size` is its approximate size in bytes and defaults to the size of the file.
        """
        size = file.size if size is None else size
        return Part(file.path, file.name, self.context.format, start, end, size, stamp=file.stamp, **more)

    def _stream(self, file: File, layout: str = "") -> Part:
        """Return a part for a file that cannot be split: the whole file, or its beginning when a sample is read.

        `layout` is the layout of the file, for readers that distinguish several.
        """
        if (end := self.context.beginning_bytes) is None:
            return self.part(file, layout=layout)
        return self.part(file, 0, end, min(end, unpacked_size(file.path, file.size)), layout=layout)

    @contextmanager
    def open(self, part: Part | File) -> Iterator[BinaryIO]:
        """Open the file of a part for reading, decompressed, from the local disk or an object store.

        Reading raises `Damaged` for corrupt compressed data.
        """
        compression = compression_of(part.path) if self.is_compressible else ""
        with filesystem.open_file(part.path, self.context.source) as file:
            packed = InflatedFile(file, compression) if compression else None
            yield file if packed is None else cast(BinaryIO, io.BufferedReader(packed, READ_BYTES))

    def head(self, part: Part | File) -> bytes:
        """Return the first HEAD_BYTES of a file, decompressed, or fewer if the file is damaged."""
        with filesystem.open_file(part.path, self.context.source) as file:
            return beginning(file, compression_of(part.path) if self.is_compressible else "", HEAD_BYTES)


def build_reader(source: Source, format_: str, corpus: Corpus | None = None, **more: Any) -> Reader:
    """Create the reader for files of a source in the format `format_`. `more` are further fields of its `Context`.

    Raises InputError if the library that `[corpus.extract]` names is not installed.
    """
    reader: Reader = make("readers", format_, source.reader)
    if reader.is_web and corpus is not None:
        check_engine(corpus.extract)
    reader._context = Context(source, format_, corpus or Corpus(), **more)
    return reader


def format_of(source: Source | None, file: File) -> str | None:
    """Return the format that the source sets, else the built-in format that recognises the file, else None."""
    return (source and source.format) or next(
        (name for name, reader in built_in_classes("readers").items() if reader.recognises(file)), None
    )


def is_wanted(source: Source, file: File) -> bool:
    """Return whether a file in a folder is read: its ending must be one that the source or its format has."""
    if source.suffixes is not None:
        return file.name.lower().endswith(tuple(suffix.lower() for suffix in source.suffixes))
    if source.format is not None:
        return bool(reader_class(source.format).matches(file.path))
    return format_of(source, file) is not None
