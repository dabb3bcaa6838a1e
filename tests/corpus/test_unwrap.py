"""Hard-wrapped prose becomes paragraphs; what only looks like it stays."""

from __future__ import annotations

import sysconfig
import textwrap
from pathlib import Path

import pytest
from corpus_samples import prose

from bessemer.corpus.extract import description, normalise, topics
from bessemer.corpus.rules.apply import apply
from bessemer.corpus.unwrap import unwrapped
from bessemer.recipe import Rules
from bessemer.recipe.rules import C4, FineWeb

PARAGRAPHS = [
    "The quick brown fox, which had been asleep for most of the afternoon, got up and looked around for the lazy dog. It was "
    "nowhere to be seen, although its bowl stood where it always stood and was full to the brim.",
    "Nobody could say later when exactly the weather had changed. The wind came from the east at first and then from all "
    "sides at once, and the trees along the river bent until their tops touched the water.",
    "A well-known rule says that a house with a red door is never cold. Whether that is so has been a matter of dispute "
    "since the first red door was painted, and no measurement has settled it.",
]


def wrapped(paragraphs: list[str], width: int, **options: str) -> str:
    return "\n\n".join(textwrap.fill(one, width, **options) for one in paragraphs)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [45, 60, 72, 80, 100])
def test_paragraphs_come_back(width: int) -> None:
    assert unwrapped(wrapped(PARAGRAPHS, width)) == "\n\n".join(PARAGRAPHS)


def test_every_width_of_prose_comes_back() -> None:
    texts = [" ".join(prose(number, 160).split()) for number in range(3)]
    for width in range(50, 120, 7):
        assert unwrapped(wrapped(texts, width)) == "\n\n".join(texts)


def test_indentation_lists_and_headings_stay() -> None:
    items = [
        textwrap.fill(one, 70, initial_indent=f"{number}. ", subsequent_indent="   ")
        for number, one in enumerate(PARAGRAPHS, 1)
    ]
    text = "A heading\n=========\n\n" + "\n".join(items) + "\n\n    code(1)\n    more = code(2)\n\nThe end."
    found = unwrapped(text)
    assert found is not None
    expected = "\n".join(f"{number}. {one}" for number, one in enumerate(PARAGRAPHS, 1))
    assert found == f"A heading\n=========\n\n{expected}\n\n    code(1)\n    more = code(2)\n\nThe end."


def test_a_cut_word_is_mended_where_it_stands_whole_elsewhere() -> None:
    cut = (
        "It was said before that the red door is a question of measure-\nment and that no other kind of evidence could settle this "
        "self-\nmade and otherwise well-known question of a whole generation."
    )
    found = unwrapped("\n\n".join([wrapped(PARAGRAPHS, 60), cut]))
    assert found is not None and "a question of measurement and" in found and "this self-made and" in found


VERSE = """
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimmed;
And every fair from fair sometime declines,
By chance, or nature's changing course untrimmed.
"""
CODE = """
def first_function_of_the_module(argument, other):
    value = argument.compute(other, options=None)
    for item in value.items_of_the_collection():
        yield transform(item, other, argument, 1)
    return [one for one in value if one is not None]
"""
TABLE = "\n".join(f"row number {number:<10}   value {number * 37:<20}   note {'x' * 20}" for number in range(12))
LIST = "\n".join(f"- item {number} of the shopping list, with a few words of what it is for" for number in range(12))
LONG_LINES = "\n\n".join(PARAGRAPHS)


@pytest.mark.parametrize("text", [VERSE, CODE, TABLE, LIST, LONG_LINES, "", "one line", "a\nb\nc\nd\ne\nf", "\n" * 50])
def test_what_is_not_wrapped_prose_stays(text: str) -> None:
    assert unwrapped(text) is None


def test_rules_on_lines_keep_wrapped_prose() -> None:
    """C4 takes the lines of a paragraph that end within a sentence, of the wrapped text; of the joined one none."""
    rules = Rules(c4=C4(min_sentences=2), fineweb=FineWeb())
    text = wrapped(PARAGRAPHS, 60)
    cut = apply(text, rules)
    assert cut.reason is not None or len(cut.text) < len(text)
    joined = unwrapped(text)
    assert joined is not None
    kept = apply(joined, rules)
    assert kept.reason is None
    assert kept.text.split() == text.split()


def good_texts() -> list[str]:
    """Reference works, documentation and code that lie on every machine with the program."""
    library, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    texts = list(topics((library / "pydoc_data" / "topics.py").read_text(encoding="utf-8")).values())
    texts += [description(path.read_text(encoding="utf-8")) for path in packages.glob("*.dist-info/METADATA")]
    texts += [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))]
    return [text for text in map(normalise, texts) if len(text) >= 200]


def test_the_default_rules_lose_less_than_one_percent_of_good_text() -> None:
    texts = good_texts()
    assert len(texts) > 250
    lost = [judged.reason for text in texts if (judged := apply(text, Rules())).reason is not None]
    assert len(lost) < 0.01 * len(texts), lost


def test_c4_keeps_most_words_of_wrapped_reference_text() -> None:
    """A third of a help topic is syntax, which C4 is made to drop; of its prose as it is hardly a line would stay."""
    wrapped_texts = {text: joined for text in good_texts() if (joined := unwrapped(text)) is not None}
    kept = {}
    for name, texts in {"as it is": wrapped_texts.keys(), "joined": wrapped_texts.values()}.items():
        judged = [(text, apply(text, Rules(c4=C4()))) for text in texts]
        words = sum(len(text.split()) for text in texts)
        kept[name] = sum(len(one.text.split()) for _, one in judged if one.reason is None) / words
    assert kept["joined"] > 2 * kept["as it is"]


WAR = (
    "Nearly all of the houses at the end of the street were built before or during the time of World War\nI. After that "
    "time many of them were left to their own devices, and the street itself was given up by\nthe town, which had no money "
    "for it and none for anything else that lay on this side of the river."
)
RECEIVE = (
    "Whoever sends a message should not assume that the other side is ready, and pairs each of its calls with\na. receive "
    "on the other side, which waits for it; the two are then done at the same moment by both of the\nprocesses, and neither "
    "of them goes on before the other one has what it needs, however long that may take."
)


@pytest.mark.parametrize("text", [WAR, RECEIVE, WAR.replace("I.", "-"), WAR.replace("I.", "12.")])
def test_a_line_that_begins_like_an_item_in_the_middle_of_a_sentence_is_none(text: str) -> None:
    whole = "\n\n".join([wrapped(PARAGRAPHS, 100), text])
    joined = unwrapped(whole)
    assert joined is not None and joined.split("\n\n")[-1] == text.replace("\n", " ")
    kept = apply(joined, Rules(c4=C4(min_sentences=2)))
    assert kept.reason is None and kept.text.split() == whole.split()


@pytest.mark.parametrize(
    "text",
    [
        WAR.replace("War\n", "War.\n"),  # the sentence has ended
        WAR.replace("War\n", "War:\n"),
        WAR.replace("during the time of World War\n", "then\n"),  # the next word would have fitted
        WAR.replace("by\nthe", "by\nJ. the"),  # a second one
        "H. It was said so before.\n" + WAR,
        WAR + "\n\nJ. And so on.",
        "A long line of introduction without any mark at its end\n- its only item\n\nshort",
    ],
)
def test_an_item_of_a_list_begins_a_line_of_its_own(text: str) -> None:
    joined = unwrapped("\n\n".join([wrapped(PARAGRAPHS, 100), text]))
    assert joined is not None
    assert "\nI. After" in joined or "\n- its only item" in joined
