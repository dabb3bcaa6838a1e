"""Text of a reply, streamed from its tokens up to a stop."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bessemer.tokens.tokenizer.tokenizer import Tokenizer


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer, stops: Collection[str]) -> Iterator[str]:
    """Yield the text of tokens in pieces, up to the first string or special token that is in `stops`."""
    ids, text, shown = list[int](), "", ""
    for token in tokens:
        if tokenizer.special.get(token) in stops:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if ends := [text.find(stop) for stop in stops if stop in text]:
            text = text[: min(ends)]
            break
        sure = _without_beginning_of(text, stops)
        if len(sure) > len(shown):
            yield sure[len(shown) :]
            shown = sure
    if len(text) > len(shown):  # text held back as the possible beginning of a stop
        yield text[len(shown) :]


def _without_beginning_of(text: str, stops: Collection[str]) -> str:
    """Remove a possible beginning of a stop string, or an incomplete character, from the end of a text."""
    text = text.rstrip("\ufffd")
    begun = [size for stop in stops for size in range(1, len(stop) + 1) if text.endswith(stop[:size])]
    return text[: len(text) - max(begun, default=0)]
