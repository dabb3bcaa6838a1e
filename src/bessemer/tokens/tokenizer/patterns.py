r"""Split patterns, which cut text into pieces before any merge, and their form in a tokenizer.json.

A pattern is a list of alternatives: contractions, runs of letters, of digits, of other signs, white space. The
published patterns differ in few choices; a recipe may override how digits and white space are cut.

Sources: gpt2, openai/gpt-2, encoder.py; gpt4, cl100k_base in openai/tiktoken, tiktoken_ext/openai_public.py (with its
possessive quantifiers written as plain ones and `\s*[\r\n]` as `\s*[\r\n]+`, which match the same text); llama3,
meta-llama/llama3, llama/tokenizer.py, equal to gpt4; qwen2, the tokenizer.json of Qwen/Qwen2-7B: gpt4 with single
digits, after NFC.
"""

from __future__ import annotations

from typing import Any, NamedTuple

DIGITS = {"runs": r"\p{N}+", "single": r"\p{N}", "groups-of-three": r"\p{N}{1,3}"}
WHITE_SPACE = {
    "one left": r"\s+(?!\S)|\s+",  # the last white space belongs to the next word
    "lines": r"\s*[\r\n]+|\s+(?!\S)|\s+",  # a piece also ends after line ends
    "indentation": r"\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+",  # with the next line's indentation
    "single": r"\s",
}
# Each pattern has placeholders for digits and white space, and names its defaults for both.
NAMED = {
    "gpt4": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|%s",
             "groups-of-three", "lines"),
    "gpt2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?%s| ?[^\s\p{L}\p{N}]+|%s", "runs", "one left"),
}  # fmt: skip
NAMED["llama3"] = NAMED["gpt4"]
NAMED["qwen2"] = (NAMED["gpt4"][0], "single", "lines")
NORMALIZERS = {"qwen2": "NFC"}  # normalizers of the patterns whose published tokenizer has one


def pattern_of(name: str, digits: str | None = None, white_space: str = "runs") -> str:
    """Return the split pattern for the recipe's tokenizer.pattern (`name`), digits and white_space, as a regular expression.

    Without `digits`, or with white_space "runs", the named pattern's own choice is used.
    """
    form, own_digits, own_white_space = NAMED[name]
    return form % (DIGITS[digits or own_digits], WHITE_SPACE[own_white_space if white_space == "runs" else white_space])


GPT4, GPT2 = pattern_of("gpt4"), pattern_of("gpt2")
# White space before a digit ends a piece, as it does at the end of a text.
GPT2_DIGITS_FIRST = GPT2.replace(r" ?\p{N}+", r"\p{N}").replace(r"|\s+(?!\S)", r"|\s+(?=\p{N})|\s+(?!\S)")


class PreTokenization(NamedTuple):
    """The pre-tokenization of a byte-level BPE.

    Attributes:
        regex: The split pattern.
        prefix_space: True if a space is put before every text.
    """

    regex: str
    prefix_space: bool = False


def pre_tokenization(description: dict[str, Any]) -> PreTokenization | None:
    """Return the pre-tokenization of a tokenizer.json; None unless it is a byte-level BPE with one regular expression.

    It must also have no normalizer other than a prefixed space, and no added tokens that are not special, because these are
    found before the text is split.
    """
    model, normalizer = description["model"], description.get("normalizer")
    keys = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type", "BPE") != "BPE" or any(model.get(key) for key in keys):
        return None
    prefix_space = normalizer == {"type": "Prepend", "prepend": " "}
    if (normalizer is not None and not prefix_space) or any(not t["special"] for t in description["added_tokens"]):
        return None
    outer = description.get("pre_tokenizer") or {}
    steps = list(outer.get("pretokenizers", [outer]))
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if steps[-1].get("use_regex", True):
        if steps[:-1] == [{"type": "Digits", "individual_digits": True}]:
            return PreTokenization(GPT2_DIGITS_FIRST, prefix_space)
        return PreTokenization(GPT2, prefix_space) if len(steps) == 1 else None
    split = steps[0]
    if len(steps) != 2 or split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    regex = split.get("pattern", {}).get("Regex")
    return None if regex is None else PreTokenization(regex, prefix_space)
