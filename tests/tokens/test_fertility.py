from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bessemer.tokens.documents import Document
from bessemer.tokens.encode import Encoder, Tally, fertility_table, merge
from bessemer.tokens.tokenizer import Tokenizer

SINGLE = (np.array([True, False, False, True]), np.array([False, False, True, True]))


def tokenizer(single_byte: Any, ids: list[int]) -> Tokenizer:
    """A tokenizer that gives every text the same ids."""
    made = SimpleNamespace(kind="wordpiece", changes=[], text_prefix=b"", unknown_token=None)
    made.token_bytes = lambda: np.where(single_byte, 1, 2)
    made.special_in = lambda text: []
    made.encode_batch = lambda texts: [np.array([*ids, 0]) for _ in texts]
    return cast(Tokenizer, made)


def measured(documents: list[tuple[str, str, str]]) -> Tally:
    encoder = Encoder(tokenizer(SINGLE[0], [0, 1, 1, 3]), [tokenizer(SINGLE[1], [1, 2])], None, 1.0, 0)
    return encoder([Document("", source, text, language=language) for source, language, text in documents]).counts.tally


def test_the_table_counts() -> None:
    tally = measured([("web", "de", "zwei Wörter"), ("web", "en", "one"), ("web", "de", " drei  Wörter\nhier ")])
    table = fertility_table(tally, ["this run", "other"], [4, 9])
    assert table["tokenizers"] == [{"name": "this run", "vocabulary": 4}, {"name": "other", "vocabulary": 9}]
    german, english = table["rows"]
    assert (german["source"], german["language"], german["documents"], german["words"]) == ("web", "de", 2, 5)
    assert german["bytes"] == len("zwei Wörter drei  Wörter\nhier ".encode())
    assert german["tokens"] == [8, 4]
    assert german["bytes_per_token"] == [round(german["bytes"] / 8, 4), round(german["bytes"] / 4, 4)]
    assert german["tokens_per_word"] == [1.6, 0.8]
    assert german["single_byte_share"] == [0.5, 0.5]
    assert english["tokens_per_word"] == [4.0, 2.0]
    assert table["all"]["tokens"] == [12, 6] and table["all"]["documents"] == 3


def test_tallies_add_up_in_any_order() -> None:
    parts = [
        measured([("a", "", "x y")]),
        measured([("b", "fr", "z")]),
        measured([("a", "", "w w w"), ("b", "fr", "v")]),
    ]
    one: Tally = {}
    two: Tally = {}
    for part in parts:
        merge(one, part)
    for part in parts[::-1]:
        merge(two, part)
    assert one == two == measured([("a", "", "x y"), ("b", "fr", "z"), ("a", "", "w w w"), ("b", "fr", "v")])


def test_the_sample_is_by_identity() -> None:
    encoder = Encoder(tokenizer(SINGLE[0], []), [], None, 0.25, 3)
    taken = [encoder.in_sample(f"{number:032x}") for number in range(4000)]
    assert 850 < sum(taken) < 1150
    assert taken == [encoder.in_sample(f"{number:032x}") for number in range(4000)]
