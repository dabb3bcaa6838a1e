"""The prose in installed Python packages: descriptions in METADATA, and the topics of `help()`."""

from __future__ import annotations

import ast
import re

from bessemer.common.errors import NotText


def description(text: str) -> str:
    """The long description of a package METADATA file: the body, or a folded Description header."""
    text = text.replace("\r\n", "\n")
    header, _, body = text.partition("\n\n")
    if body.strip():
        return body
    found = re.search(r"^Description:(.*)((?:\n[ \t].*)*)", header, re.MULTILINE)
    if not found:
        return ""
    folded = [re.sub(r"^(?: {7}\||\t| {1,8})", "", line) for line in found[2].split("\n")[1:]]
    return "\n".join([found[1].strip(), *folded])


def topics(code: str) -> dict[str, str]:
    """The texts in pydoc_data/topics.py. The file is parsed as a literal, never run. Raises NotText."""
    try:
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign):
                value = ast.literal_eval(statement.value)
                if isinstance(value, dict):
                    return {str(name): text for name, text in value.items() if isinstance(text, str)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotText(f"not a dictionary of texts: {error}") from None
    raise NotText("no dictionary of texts")
