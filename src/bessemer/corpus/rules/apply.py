"""All rules of a recipe, in one fixed order, on one document.

The order: the basic rules on the text as it came; code; textbook; gopher_quality; gopher_repetition; nemo; refinedweb
(removes lines); c4 (removes lines); fineweb, on what stays; adult; toxic; and, when lines were removed, the basic
rules' length once more. A document is rejected by the first rule that it breaks, so it has one reason.
"""

from __future__ import annotations

from bessemer.corpus.rules.basic import judge
from bessemer.corpus.rules.findings import Finding, Judgement, against
from bessemer.errors import InputError
from bessemer.recipe.rules import Rules

COUNTING = ("code", "textbook", "gopher_quality", "gopher_repetition", "nemo", "refinedweb", "c4", "fineweb")
"""Sets that need the compiled statistics."""


def apply(text: str, rules: Rules, language: str = "en") -> Judgement:
    """Judge one normalised text; `language` (ISO 639-1) chooses the word lists.

    The text comes back edited when a set edits; of a rejected document as it came. Raises InputError when a list or a
    model that the recipe names cannot be read, or Numba is missing.
    """
    basic = judge(text, rules)
    if basic is not None:
        return Judgement(text, *basic)
    edited, finding = (text, None) if all(getattr(rules, name) is None for name in COUNTING) else _count(text, rules)
    if finding is None and rules.adult is not None:
        from bessemer.corpus.rules import flagged

        finding = flagged.judge(edited, "adult", rules.adult, language)
    if finding is None and rules.toxic is not None:
        from bessemer.corpus.rules import flagged

        finding = flagged.judge(edited, "toxic", rules.toxic, language)
    if finding is None and edited != text:
        if not edited or edited.isspace():
            finding = Finding("empty", "no line is left")
        elif len(edited) < rules.min_characters:
            finding = Finding("too_short", f"{against(len(edited), rules.min_characters)} characters are left")
    if finding is not None:
        return Judgement(text, *finding)
    return Judgement(edited, None, "")


def _count(text: str, rules: Rules) -> tuple[str, Finding | None]:
    try:
        from bessemer.corpus.rules import c4, code, fineweb, gopher, nemo, refinedweb, textbook
        from bessemer.corpus.rules.counts import Statistics
    except ImportError as error:
        raise InputError(
            f"corpus.rules: the sets of rules are compiled with Numba, which cannot be used here ({error}); "
            "pip install 'bessemer[corpus]', or leave the sets out"
        ) from None
    found = Statistics(text)
    finding: Finding | None = None
    if rules.code is not None:
        finding = code.judge(found, rules.code)
        if finding is None and rules.code.strip_licence:
            stripped = code.strip_licence(text)
            found = found if stripped == text else Statistics(stripped)
    if finding is None and rules.textbook is not None:
        finding = textbook.judge(found, rules.textbook)
    if finding is None and rules.gopher_quality is not None:
        finding = gopher.quality(found, rules.gopher_quality)
    if finding is None and rules.gopher_repetition is not None:
        finding = gopher.repetition(found, rules.gopher_repetition)
    if finding is None and rules.nemo is not None:
        finding = nemo.judge(found, rules.nemo)
    if finding is None and rules.refinedweb is not None:
        found, finding = refinedweb.edit(found, rules.refinedweb)
    if finding is None and rules.c4 is not None:
        found, finding = c4.edit(found, rules.c4)
    if finding is None and rules.fineweb is not None:
        finding = fineweb.judge(found, rules.fineweb)
    return found.text, finding
