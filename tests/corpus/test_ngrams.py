import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the corpus extra is not installed")

from bessemer.text.hashing import hash_ngrams
from bessemer.text.ngrams import UNSPACED, find, folded_words, table

LETTERS = st.text(alphabet="aAbBéÉßñ12 .,\n-日本гД\u0301😀ガカﾞ½ﬁＡ\u00ad\u200b", max_size=80)


def gram_hashes(text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each n-gram of `length` words with its first and end character: (n-grams, 2)."""
    hashes, spans = folded_words(text)
    count = hash_ngrams(hashes, len(hashes), length, hashes)
    return hashes[:count], np.stack([spans[:count, 0], spans[len(spans) - count :, 1]], axis=1)


def alone(letter: str) -> bool:
    return any(low <= ord(letter) <= high for low, high in UNSPACED) and letter not in "\u3099\u309a"


def words(text: str) -> list[tuple[str, int, int]]:
    """Return the words by their plain definition, as a reference for the compiled pass."""
    found: list[tuple[str, int, int]] = []
    for place, character in enumerate(text):
        whole = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
        for part in whole if unicodedata.category(character)[0] in "LNMSP" else character:
            category = unicodedata.category(part)
            if category == "Cf":
                continue
            if category[0] not in "LNM":
                found.append(("", place, place))
            elif found and found[-1][0] and not alone(part) and (category[0] == "M" or not alone(found[-1][0][0])):
                found[-1] = (found[-1][0] + part, found[-1][1], place + 1)
            elif category[0] != "M" or alone(part):
                found.append((part, place, place + 1))
    return [word for word in found if word[0]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, WORLD!", ["hello", "world"]), ("don't", ["don", "t"]), ("x_1 + y2", ["x", "1", "y2"]),
        ("“Quoted” – naïve", ["quoted", unicodedata.normalize("NFD", "naïve")]),
        ("我喜欢Python", ["我", "喜", "欢", "python"]), ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("ﬁ\u00adne ½ Ｆｕｌｌ", ["fine", "1", "2", "full"]), ("ｶﾞガ", ["カ\u3099", "カ\u3099"]), ("´ a", ["a"]),
        ("㍿" * 3, ["株", "式", "会", "社"] * 3), ("", []), ("...", []),
    ],
)  # fmt: skip
def test_words_equal_their_definition(text: str, expected: list[str]) -> None:
    assert [word for word, _, _ in words(text)] == expected
    assert len(folded_words(text)[0]) == len(expected)


@settings(max_examples=300, deadline=None)
@given(LETTERS, st.integers(1, 5))
def test_equal_grams_and_no_others_have_equal_hashes(text: str, length: int) -> None:
    plain = words(text)
    expected = [tuple(word for word, _, _ in plain[at : at + length]) for at in range(len(plain) - length + 1)]
    places = [(plain[at][1], plain[at + length - 1][2]) for at in range(len(expected))]
    hashes, spans = gram_hashes(text, length)
    assert spans.tolist() == [list(place) for place in places]
    assert len(set(hashes.tolist())) == len(set(expected))
    assert len(set(zip(hashes.tolist(), expected, strict=True))) == len(set(expected))


@settings(max_examples=200, deadline=None)
@given(LETTERS, LETTERS)
def test_found_ngrams_are_those_in_both_texts(kept: str, text: str) -> None:
    lengths = (2, 3)
    hashes = np.unique(np.concatenate([gram_hashes(kept, length)[0] for length in lengths]))
    found, spans = find(text, np.array(lengths, dtype=np.int64), *table(hashes))
    there = {hash_: number for number, hash_ in enumerate(hashes.tolist())}
    expected = []
    for length in lengths:
        expected += [
            (there[hash_], *place)
            for hash_, place in zip(*(part.tolist() for part in gram_hashes(text, length)), strict=True)
            if hash_ in there
        ]
    assert sorted(zip(found.tolist(), *spans.T.tolist(), strict=True)) == sorted(map(tuple, expected))


@pytest.mark.parametrize("text", ["x" * 20_000_000, "a " * 5_000_000, "é" * 5_000_000, "\0" * 5_000_000, "\ud800 x"])
def test_extreme_text_takes_linear_time(text: str) -> None:
    slots = table(gram_hashes("one two three", 3)[0])
    assert len(find(text, np.array([3], dtype=np.int64), *slots)[0]) == 0
