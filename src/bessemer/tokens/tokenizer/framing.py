"""Special tokens that a tokenizer puts around every text, such as BOS and EOS or [CLS] and [SEP]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bessemer.tokens.tokenizer.vocabulary import ids_by_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer


@dataclass(frozen=True)
class Framing:
    """Ids before and after the ids of every text, wherever a model is used: generation, evaluation, the exported tokenizer.

    A model trained here has end-of-text before each document; an imported one what its own tokenizer adds.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text with their framing."""
        return [*self.before, *ids, *self.after]


def framing_between(plain: Sequence[int], whole: Sequence[int]) -> Framing | None:
    """What was put around `plain` to make `whole`; None where `plain` does not occur in it."""
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if list(whole[start : start + size]) == list(plain):
            return Framing(tuple(whole[:start]), tuple(whole[start + size :]))
    return None


def with_framing(description: dict[str, Any], framing: Framing) -> dict[str, Any]:
    """A tokenizer.json's content that puts these ids around a text; unchanged where it does so already.

    With a pair of texts the second has type 1 and the same framing (as `transformers` does for `add_bos_token`), but without
    the ids before it where some come after, as in [CLS] A [SEP] B [SEP].
    """
    from tokenizers import Tokenizer

    if framing_of(Tokenizer.from_str(json.dumps(description))) == framing:
        return description
    token_of = {number: token for token, number in ids_by_token(description).items()}
    names = {number: token_of[number] for number in (*framing.before, *framing.after)}

    def part(letter: str, kind: int) -> list[dict[str, Any]]:
        def special(number: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": names[number], "type_id": kind}}

        before = framing.before if kind == 0 or not framing.after else ()
        return [*map(special, before), {"Sequence": {"id": letter, "type_id": kind}}, *map(special, framing.after)]

    template = {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()},
    }
    return {**description, "post_processor": template}


def framing_of(tokenizer: HuggingFaceTokenizer) -> Framing | None:
    """The ids that a tokenizer puts around a text; None where it does something else."""
    encoded = ((tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.encode(text).ids) for text in "a1.")
    return next((framing_between(plain, whole) for plain, whole in encoded if plain), None)
