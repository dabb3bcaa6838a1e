"""Whether a clean text is kept, and the one reason when it is not.

Each rule is one pass at C speed (str methods, bytes.translate, one NumPy table look-up), so that a document
of 50 MB is decided within a second and no regular expression can be driven into backtracking.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from bessemer.recipe import Rules

if TYPE_CHECKING:
    import numpy as np

ASCII_ALPHANUMERIC = bytes(code for code in range(128) if chr(code).isalnum())
ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def judge(text: str, rules: Rules) -> tuple[str, str] | None:
    """The reason and the measured value for which `text` (normalised) is rejected; None when it is kept."""
    if not text or text.isspace():
        return "empty", ""
    if len(text) < rules.min_characters:
        return "too_short", f"{len(text)} characters"
    if len(text) > rules.max_characters:
        return "too_long", f"{len(text)} characters"
    lines = list(filter(None, text.split("\n")))
    mean = (len(text) - text.count("\n")) / len(lines)
    if mean > rules.max_mean_line_length:
        return "long_lines", f"mean line of {mean:.0f} characters"
    # A share is never below 0: such a threshold switches its rule off, and nothing is counted for it.
    if rules.min_alphanumeric_share > 0 and (share := alphanumeric_share(text)) < rules.min_alphanumeric_share:
        return "not_text", f"{share:.2f} of the characters are letters or digits"
    if rules.min_unique_line_share > 0:
        unique = len(set(map(str.strip, lines))) / len(lines)
        if unique < rules.min_unique_line_share:
            return "repetitive", f"{unique:.2f} of the lines are distinct"
    return None


def alphanumeric_share(text: str) -> float:
    """Letters and digits of any script, divided by the characters other than white space."""
    if text.isascii():
        raw = text.encode("ascii")
        others = len(raw.translate(None, ASCII_ALPHANUMERIC))
        visible = len(raw.translate(None, ASCII_SPACE))
        return (len(raw) - others) / max(visible, 1)
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    _, alphanumeric, space = np.bincount(_classes()[codes], minlength=3)
    return float(alphanumeric / max(len(codes) - space, 1))


@cache
def _classes() -> np.ndarray:
    """Class of every code point: 1 letter or digit, 2 white space, 0 anything else."""
    import numpy as np

    from bessemer.corpus.rules.characters import ALPHANUMERIC, SPACE, python_table

    bits = python_table()
    return (bits & ALPHANUMERIC > 0) + 2 * (bits & SPACE > 0).astype(np.uint8)
