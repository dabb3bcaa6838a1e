import pytest
from tokenizers import Regex, pre_tokenizers

from bessemer.common.errors import InputError
from bessemer.tokens.tokenizer.patterns import GPT2, GPT4, check_custom, pattern_of


def cut(regex: str, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizers.Split(Regex(regex), "isolated").pre_tokenize_str(text)]


def test_the_published_patterns() -> None:
    # openai/tiktoken, tiktoken_ext/openai_public.py and meta-llama/llama3, llama/tokenizer.py
    llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert pattern_of("llama3", None, "runs") == pattern_of("gpt4", None, "runs") == llama3
    assert pattern_of("gpt2", None, "runs") == gpt2
    assert (llama3, gpt2) == (GPT4, GPT2)


def test_digits() -> None:
    text = "in 1234567 ways"
    assert cut(pattern_of("gpt4", None, "runs"), text) == ["in", " ", "123", "456", "7", " ways"]
    assert cut(pattern_of("gpt4", "single", "runs"), text)[2:9] == list("1234567")
    assert cut(pattern_of("gpt4", "runs", "runs"), text) == ["in", " ", "1234567", " ways"]
    assert cut(pattern_of("gpt2", None, "runs"), text) == ["in", " 1234567", " ways"]
    assert cut(pattern_of("gpt2", "groups-of-three", "runs"), text) == ["in", " 123", "456", "7", " ways"]


def test_white_space() -> None:
    text = "a:\n        return  x"
    assert cut(pattern_of("gpt4", None, "runs"), text) == ["a", ":\n", "       ", " return", " ", " x"]
    code = "a\n        return  x"
    assert cut(pattern_of("gpt4", None, "indentation"), code) == ["a", "\n        ", "return", " ", " x"]
    assert cut(pattern_of("gpt4", None, "single"), code) == ["a", "\n", *" " * 7, " return", " ", " x"]


@pytest.mark.parametrize(
    "regex", [r"\w+|[^\w\s]+|\s+", r"[a-z^$]+|.", r"\p{L}{1,8}|\p{N}|[^\p{L}\p{N}]", r" ?\S+|\s+(?!\S)|\s+", r"(?:ab|cd)+|."]
)  # fmt: skip
def test_plain_patterns_of_one_s_own_are_allowed(regex: str) -> None:
    check_custom(regex)
    assert pattern_of(regex, None, "runs") == regex


@pytest.mark.parametrize(
    ("regex", "why"),
    [(r"(a+)+b", "backtracks too much"), (r"[a-", "not a regular expression"), (r".*.*.*1z|.", "backtracks too much")],
)
def test_patterns_that_may_take_for_ever_are_refused(regex: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"tokenizer.pattern: .*{why}"):
        check_custom(regex, probe_seconds=0.1)


def test_digits_and_a_pattern_of_one_s_own_exclude_each_other() -> None:
    with pytest.raises(InputError, match=r"leave tokenizer.digits and tokenizer.white_space out"):
        pattern_of(r"\S+|\s+", "single", "runs")
