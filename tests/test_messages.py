"""The wording of every message to users is in tests/messages.txt, so that improving a sentence changes one line there.

`BESSEMER_WRITE_MESSAGES=1 pytest tests/test_messages.py` writes the file.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE, GOLDEN = Path(__file__).parents[1] / "src/bessemer", Path(__file__).with_name("messages.txt")
PRINTERS = {"say", "warn", "progress", "require_import", "Stopped", "DamagedFile", "FileChanged", "TooFewIds"}


def template(node: ast.expr) -> str:
    """Return the text of an expression, with the expressions that it formats in braces; empty if it has no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{template(body)} | {template(orelse)}"
    return ""


def messages() -> Iterator[str]:
    """Yield each message of the program as "MODULE: TEXT": of errors, of printed lines, and what a check yields."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if (
                    name in PRINTERS or name.endswith("Error")
                ):
                    texts = arguments
                case ast.Yield(value=ast.expr() as value):
                    texts = [value]
                case _:
                    continue
            lines = (" ".join(template(text).split()) for text in texts)
            yield from (f"{path.relative_to(SOURCE)}: {line}" for line in lines if " " in line)


def test_messages_equal_those_of_the_golden_file() -> None:
    lines = sorted(set(messages()))
    if os.environ.get("BESSEMER_WRITE_MESSAGES"):
        GOLDEN.write_text("\n".join(lines) + "\n")
        pytest.skip(f"wrote {GOLDEN.name}")
    assert GOLDEN.read_text().splitlines() == lines
