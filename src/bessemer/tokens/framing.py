"""The tokens around a text: which ids a model is used with before and after the ids of the text itself.

A model trained here reads each document after an end-of-text token, so that token comes first wherever the model is used:
`generate`, `evaluate`, `classify`, and the exported tokenizer. An imported model keeps the tokens that its own tokenizer adds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Framing:
    """Ids before and after the ids of every text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text with those that belong around it."""
        return [*self.before, *ids, *self.after]


def framing_between(plain: Sequence[int], whole: Sequence[int]) -> Framing | None:
    """What was put around `plain` to make `whole`; None where `plain` does not occur in it."""
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if list(whole[start : start + size]) == list(plain):
            return Framing(tuple(whole[:start]), tuple(whole[start + size :]))
    return None


def framing_of(description: dict[str, Any]) -> Framing | None:
    """The ids that a tokenizer.json's content puts around a text; None where it does something else."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(description))
    sample = next((text for text in ("a", "1", ".") if tokenizer.encode(text, add_special_tokens=False).ids), "")
    plain = tokenizer.encode(sample, add_special_tokens=False).ids
    return framing_between(plain, tokenizer.encode(sample).ids) if plain else None


def with_framing(description: dict[str, Any], framing: Framing) -> dict[str, Any]:
    """A tokenizer.json's content that puts these ids around a text: as it is where it does so already, which keeps its own way
    with pairs of texts, else with a template in the place of what it put there before.

    In that a second text follows with type 1 and the same tokens around it, as `transformers` does for `add_bos_token`, but
    without those before it where some come after, as with [CLS] A [SEP] B [SEP].
    """
    if framing_of(description) == framing:
        return description
    token_of = {number: token for token, number in _vocabulary(description).items()}
    names = {number: token_of[number] for number in (*framing.before, *framing.after)}

    def part(letter: str, kind: int) -> list[dict[str, Any]]:
        def special(number: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": names[number], "type_id": kind}}

        text = {"Sequence": {"id": letter, "type_id": kind}}
        before = framing.before if kind == 0 or not framing.after else ()
        return [*map(special, before), text, *map(special, framing.after)]

    template = {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()},
    }
    return {**description, "post_processor": template}


def _vocabulary(description: dict[str, Any]) -> dict[str, int]:
    vocabulary = description["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: (token, score) in the order of the ids
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in description["added_tokens"]}}
