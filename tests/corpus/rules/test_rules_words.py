"""The word splitter compared with recorded output of spaCy (blank English tokenizer, 3.8), and on random text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.text.statistics import Statistics


def split(text: str) -> list[str]:
    starts, ends = Statistics(text).word_spans
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""), (" \n\t ", ""), ("one two\n\nthree", "one two three"), ("(really?) yes.", "( really ? ) yes ."),
        ("I don't, you can't've", "I do n't , you ca n't 've"), ("John's dogs' bone", "John 's dogs ' bone"),
        ("dont cannot Im its well", "do nt can not I m its well"), ("he’s we’ll", "he ’s we ’ll"),
        ("Mr. Smith, e.g. U.S. and x.y", "Mr. Smith , e.g. U.S. and x.y"), ("end.Start", "end . Start"),
        ("wait... what…", "wait ... what …"), ("a well-known-fact 2-3 x--y", "a well - known - fact 2 - 3 x -- y"),
        ("and/or a/b w/o", "and/or a / b w/o"), ("10km 5kg 3.5 $20 20€ 50%", "10 km 5 kg 3.5 $ 20 20 € 50 %"),
        ("7pm 11a.m.", "7 pm 11 a.m."), ("+49 +x", "+49 + x"),
        ("http://foo.com/a-b?x=y#z, x", "http://foo.com/a-b?x=y#z , x"),
        ("me@example.com-x.org", "me@example.com-x.org"),
        ("foo.bar-baz foo.bar/baz-x", "foo.bar - baz foo.bar/baz-x"),
        ("http://8.8.8.8/a-b", "http://8.8.8.8/a-b"),
        ("def f(x): return x", "def f(x ): return x"), ("('')", "( '' )"), ("x :) y", "x :) y"),
        ("🙂hi🙂 a🙂b", "🙂 hi 🙂 a 🙂 b"), ("「日本語」です。 「日本」", "「 日本語」です 。 「 日本 」"),
        ("«Привет», сказал", "« Привет » , сказал"), ("مرحبا، بالعالم", "مرحبا ، بالعالم"),
    ],
)  # fmt: skip
def test_words_equal_those_of_spacy(text: str, words: str) -> None:
    assert split(text) == words.split()


MIXED = st.text(
    st.one_of(
        st.sampled_from("abcXYZ019 .,;:'\"()[]{}<>-–—/+=*^~_#%$€\n\t\r\x0b\u2028’“”…•😀日本語жЖαΩשلอ\x00"),
        st.characters(codec="utf-8"),
    ),
    max_size=200,
)


@given(MIXED)
def test_words_and_white_space_join_to_the_text(text: str) -> None:
    words = split(text)
    assert "".join(words) == "".join(text.split())
    assert all(word and not any(map(str.isspace, word)) for word in words)


@pytest.mark.parametrize("unit", ["x", "(", ".", "@", "a@", "(a)", "a-", "😀", "://a", "'s"])
@pytest.mark.fault(24)
def test_a_huge_word_is_split_in_linear_time(unit: str) -> None:
    """A million characters without white space, for which a quadratic step would not finish."""
    text = unit * (1_000_000 // len(unit))
    assert "".join(split(text)) == text
