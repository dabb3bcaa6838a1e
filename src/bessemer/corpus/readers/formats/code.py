"""Files of source code, one document each."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.encodings import unicode_of
from bessemer.corpus.readers.formats.text import TextReader

BINARY_BYTES = 8000  # a file with a NUL among its first bytes is binary, the same rule as in git


class CodeReader(TextReader):
    """A reader of whole files of source code. Binary files are rejected."""

    suffixes = (
        ".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".cs", ".java",
        ".kt", ".scala", ".go", ".rs", ".swift", ".m", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".rb", ".php",
        ".pl", ".pm", ".lua", ".r", ".jl", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".clj", ".el",
        ".lisp", ".f90", ".sql", ".sh", ".bash", ".ps1", ".cmake", ".proto", ".vue", ".dart", ".zig",
        ".nim", ".v", ".sv", ".vhd", ".asm", ".s",
    )  # fmt: skip

    def _documents(self, raw: bytes, part: Part) -> Iterator[Document]:
        if not unicode_of(raw) and (nul := raw.find(0, 0, BINARY_BYTES)) >= 0:
            yield Document("", len(raw), reason="binary", detail=f"a NUL at byte {nul}")
        else:
            yield from super()._documents(raw, part)
