"""All rules together: their order, their edits, and texts that break a careless rule."""

from __future__ import annotations

import pytest

from bessemer.corpus.document import Reject
from bessemer.corpus.filters.rules import apply as rules_apply
from bessemer.corpus.filters.rules.apply import RULE_REASONS
from bessemer.corpus.statistics import REASONS
from bessemer.recipe import Rules
from bessemer.recipe.rules import C4, Code, Fineweb, GopherQuality, GopherRepetition, Textbook
from tests.costs import no_quadratic_pass

EVERY = {
    "code": Code(), "textbook": Textbook(), "gopher_quality": GopherQuality(), "gopher_repetition": GopherRepetition(),
    "c4": C4(), "fineweb": Fineweb(),
}  # fmt: skip
OPEN = {
    "min_characters": 0, "max_characters": 10**9, "max_mean_line_length": 1e12, "min_alphanumeric_share": 0.0,
    "min_unique_line_share": 0.0,
}  # fmt: skip
SUBJECTS = ("The old miller", "A young clerk", "That tall stranger", "Our neighbour", "The tired postman")
VERBS = ("looked at", "forgot about", "wrote to", "was afraid of", "had always liked")
PROSE = "\n".join(
    f"{subject} {verb} the {thing} with {number} different reasons to be there."
    for number, (subject, verb, thing) in enumerate(
        (subject, verb, thing) for subject in SUBJECTS for verb in VERBS for thing in ("river", "garden", "letter")
    )
)


def apply(text: str, rules: Rules) -> Reject | str:
    return rules_apply.apply(text, rules.of_source())


LENIENT = {
    **EVERY,
    "code": Code(max_mean_line_length=1e9),
    "textbook": Textbook(min_distinct_word_share=0.05),
    "gopher_repetition": GopherRepetition(**dict.fromkeys(GopherRepetition.model_fields, 1.0)),
}


@pytest.mark.parametrize(
    ("text", "changed", "reason"),
    [
        ("", {}, "empty"),
        ("x", {}, "too_short"),
        ("# auto-generated\n" + "word " * 60, {}, "code.generated"),
        ("word " * 60, {}, "textbook.distinct_words"),
        ("Ein Satz bleibt deutsch. " * 9 + "".join(f"Wort{i} " for i in range(99)), {}, "gopher_quality.stop_words"),
        (PROSE + "\n" + PROSE, {"textbook": None, "gopher_repetition": GopherRepetition()}, "gopher_repetition.lines"),
        (PROSE.replace("reasons", "{reasons}", 1), {}, "c4.curly_bracket"),
        (PROSE + "\n" + PROSE[:200], {"c4": None}, "fineweb.duplicate_characters"),
    ],
)
def test_the_first_rule_in_order_gives_the_reason(text: str, changed: dict[str, object], reason: str) -> None:
    found = apply(text, Rules(**{**LENIENT, **changed}))
    assert isinstance(found, Reject) and found.reason == reason
    assert reason in REASONS


def test_prose_is_kept_and_lines_are_edited() -> None:
    rules = Rules(**LENIENT)
    assert apply(PROSE, rules) == PROSE
    assert apply(f"a menu without an end\n{PROSE}", rules) == PROSE


def test_a_text_that_is_too_short_after_edits_is_rejected() -> None:
    sentences = "Here is a sentence. Here is one. And one more. And another one. And the last one."
    text = "a line without an end mark\n" * 9 + sentences
    assert apply(text, Rules(c4=C4(), min_unique_line_share=0.0)).reason == "too_short"
    assert apply(text, Rules(c4=C4(min_sentences=0), min_characters=0)) == sentences
    assert apply("no end mark " * 30, Rules(c4=C4(min_sentences=0))).reason == "empty"


def test_every_reason_is_registered_once() -> None:
    assert set(RULE_REASONS) < set(REASONS)
    assert all("." in reason for reason in RULE_REASONS)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 5_000_000, "a\n" * 1_000_000, "\x00a " * 300_000, "😀 👩‍👩‍👧 " * 200_000, "日本語の文章です。" * 200_000,
        "[1" * 500_000, "http://" * 300_000, "de ad be ef " * 200_000, "items in cart\n" * 100_000,
        "Sign-in items in cart " * 50_000, ". " * 500_000, "\ud800" * 1000,
    ],
    ids=lambda text: ascii(text[:12]),
)  # fmt: skip
def test_extreme_texts_take_linear_time_and_raise_nothing(text: str) -> None:
    """Apply each set alone, so that no earlier rule protects it: linear time and no exception."""
    apply(PROSE, Rules(**OPEN, **EVERY))  # compiled before timing
    for name, settings in EVERY.items():
        with no_quadratic_pass():
            found = apply(text, Rules(**{**OPEN, name: settings}))
        assert isinstance(found, str) or found.reason in REASONS
