"""All rules of a recipe, in one fixed order, on one document.

The order: the basic rules on the text as it came; code; textbook; gopher_quality; gopher_repetition; nemo; refinedweb
(removes lines); c4 (removes lines); fineweb, on what stays; adult; toxic; and, when lines were removed, the basic
rules' length once more. A document is rejected by the first rule that it breaks, so it has one reason.
"""

from __future__ import annotations

from bessemer.corpus.rules.basic import judge
from bessemer.corpus.rules.table import Finding, Judgement, against, check
from bessemer.errors import InputError
from bessemer.recipe.rules import Rules

COUNTING = ("code", "textbook", "gopher_quality", "gopher_repetition", "nemo", "refinedweb", "c4", "fineweb")
"""Sets that need the compiled statistics, in their order."""


def apply(text: str, rules: Rules, language: str = "en") -> Judgement:
    """Judge one normalised text; `language` (ISO 639-1) chooses the word lists.

    The text comes back edited when a set edits; of a rejected document as it came. Raises InputError when a list or a
    model that the recipe names cannot be read, or Numba is missing.
    """
    basic = judge(text, rules)
    if basic is not None:
        return Judgement(text, *basic)
    edited, finding = (text, None) if all(getattr(rules, name) is None for name in COUNTING) else _count(text, rules)
    for name in ("adult", "toxic"):
        if finding is None and getattr(rules, name) is not None:
            from bessemer.corpus.rules.lists import judge_flagged

            finding = judge_flagged(edited, name, getattr(rules, name), language)
    if finding is None and edited != text:
        if not edited or edited.isspace():
            finding = Finding("empty", "no line is left")
        elif len(edited) < rules.min_characters:
            finding = Finding("too_short", f"{against(len(edited), rules.min_characters)} characters are left")
    return Judgement(edited, None, "") if finding is None else Judgement(text, *finding)


def _count(text: str, rules: Rules) -> tuple[str, Finding | None]:
    """The text as the counting sets leave it, and the first rule of theirs that it breaks."""
    try:
        from bessemer.corpus.rules.edits import edit_c4, edit_refinedweb, strip_licence
        from bessemer.corpus.text.statistics import Statistics
    except ImportError as error:
        raise InputError(
            f"corpus.rules: the sets of rules are compiled with Numba, which cannot be used here ({error}); "
            "pip install 'bessemer[corpus]', or leave the sets out"
        ) from None
    statistics, finding = Statistics(text), None
    for name in COUNTING:
        settings = getattr(rules, name)
        if settings is None:
            continue
        if name == "refinedweb":
            statistics, finding = edit_refinedweb(statistics, settings)
        elif name == "c4":
            statistics, finding = edit_c4(statistics, settings)
        else:
            finding = check(name, statistics, settings)
        if finding is not None:
            break
        if name == "code" and settings.strip_licence and (stripped := strip_licence(text)) != text:
            statistics = Statistics(stripped)
    return statistics.text, finding
