"""Format and compression of a file, by its name. Case does not matter."""

from __future__ import annotations

import os
import re

from bessemer.recipe.corpus import Format

# By the end of the file's name.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
CODE_SUFFIXES = (
    ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".cs", ".java",
    ".kt", ".scala", ".go", ".rs", ".swift", ".m", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php",
    ".pl", ".pm", ".lua", ".r", ".jl", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".clj", ".el",
    ".lisp", ".f90", ".sql", ".sh", ".bash", ".ps1", ".cmake", ".proto", ".vue", ".dart", ".zig",
    ".nim", ".v", ".sv", ".vhd", ".asm", ".s",
)  # fmt: skip
TOPICS = "pydoc_data/topics.py"  # the language reference that Python carries for `help()`: a dictionary of texts
# What is taken from a folder, by format. `descriptions` is the prose that installed packages carry; not their .txt files,
# which are licences, word lists and tables of data.
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "code": CODE_SUFFIXES,
    "html": (".html", ".htm", ".xhtml"),
    "warc": (".warc", ".wet", ".arc"),
    "mediawiki": (".xml",),
    "jsonl": (".jsonl", ".ndjson", ".json", ".csv", ".tsv"),
    "parquet": (".parquet", ".pq"),
    "chat": (".jsonl", ".ndjson", ".json", ".parquet", ".pq"),
    "descriptions": ("METADATA", ".rst", ".md", TOPICS),
}
NEVER_COMPRESSED = ("parquet", "descriptions")  # Parquet compresses by itself
# Told by a file's ending, for a source without a format. An .xml file is read as a dump only where it is named like one.
GUESSED: tuple[Format, ...] = ("jsonl", "parquet", "warc", "html", "text", "code")
# How Wikipedia names its dumps, and parts of a dump, after the pages they hold.
DUMP = re.compile(r"-pages-(articles|meta)[^/]{0,80}\.xml[^/]{0,40}$", re.IGNORECASE)
DUMP_PART = re.compile(r"\.xml-p\d{1,12}p\d{1,12}(-[a-z]{1,20})?$", re.IGNORECASE)


def compression_of(path: str) -> str:
    """Return the compression of a file by its name; "" for none."""
    return COMPRESSIONS.get(os.path.splitext(path)[1].lower(), "")


def without_compression(name: str) -> str:
    """Return the name without the suffix of a compression."""
    return os.path.splitext(name)[0] if compression_of(name) else name


def has_format(name: str, format: str) -> bool:
    """Return True if a file in a folder is read as this format."""
    if format == "descriptions":
        return name.endswith(SUFFIXES[format])
    plain = name if format in NEVER_COMPRESSED else without_compression(name)
    return plain.lower().endswith(SUFFIXES[format]) or (format == "mediawiki" and bool(DUMP_PART.search(plain)))


def guess_format(name: str) -> Format | None:
    """Return the format of a file by its name; None if the name does not tell."""
    plain = without_compression(name)
    if DUMP.search(plain) or DUMP_PART.search(plain):
        return "mediawiki"
    return next((kind for kind in GUESSED if has_format(name, kind)), None)


def ending(name: str) -> str:
    """The ending under which a file that is not read is counted: with that before a compression, in small letters."""
    base = os.path.basename(name).lower()
    last = os.path.splitext(base)[1]
    before = os.path.splitext(without_compression(base))[1] if compression_of(base) else ""
    return before + last or "no ending"
