"""Conversations to tokens: the chat template, and which of the tokens the assistant said.

A template marks what the assistant says by {% generation %}...{% endgeneration %}; the loss is of these tokens alone. Ids and
mask are those of `transformers`: apply_chat_template(..., return_assistant_tokens_mask=True).
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.console import counted, warn
from bessemer.common.errors import InputError
from bessemer.corpus.conversation import NO_CHARACTERS, OPTIONS, REASONING, SPOKEN, changed, is_trained, record_in
from bessemer.recipe import Recipe
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.choice import files_to_copy
from bessemer.tokens.tokenizer.files import folder_of
from bessemer.tokens.tokenizer.templates import CHATML, JinjaTemplate, chat_template, read_template, template_names
from bessemer.tokens.tokenizer.tokenizer import Ids

MARKS = NO_CHARACTERS  # around what the assistant says
Spans = list[tuple[int, int]]
# After a string: its field, its message (None: the record), of what one must be written.
Word = tuple[str, int | None, object]
NONCE = f"w{secrets.token_hex(4)}x"  # that no text has
WORD = re.compile(NONCE + r"(\d+)q")
PROBE = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
NOT_WRITTEN = "{} has {}, which the chat template does not write"
ADVICE = (
    "name a template by tokens.chat_template, a file or chatml, in which what the assistant says stands between "
    "{% generation %} and {% endgeneration %}"
)


def template_source(recipe: Recipe) -> str:
    """The text of the template: of the file that the recipe names, of the tokenizer's folder, else ChatML. Raises InputError."""
    named = recipe.tokens.chat_template
    if named not in (None, "chatml"):
        return read_template(Path(str(named)), "tokens.chat_template")
    path = recipe.tokenizer.path if named is None else None
    own = None if path is None else chat_template(folder_of(path))
    return CHATML if own is None else own


def report_rejected(refusals: Counter[str], taken: int, first: str) -> None:
    """Warn of conversations that the template refuses; tokens/manifest.json has all `refusals` by their reasons.

    Args:
        refusals: The number of conversations by reason.
        taken: The number of the others.
        first: The reason for one, with its document.

    Raises:
        InputError: When the template refuses more than half.
    """
    refused = refusals.total()
    said = f"{refused:,} of {counted(refused + taken, 'conversation')} left out, as the chat template refuses them; {first}"
    if refused > taken:
        raise InputError(f"{said}; give a template that takes them by tokens.chat_template")
    warn(said)


class ChatTemplate:
    """Renders conversations and finds the tokens that are trained on.

    Attributes:
        sources: The names under which conversations are stored.
        source: The template, in Jinja.
        names: The special tokens by their names in the template.
        turn_end: The last token that is trained on in a turn, white space apart.
    """

    def __init__(self, sources: frozenset[str], source: str, names: dict[str, str], tokenizer: Tokenizer) -> None:
        self.sources, self.source, self.names, self._tokenizer = sources, source, names, tokenizer
        try:
            self._template = JinjaTemplate(source, names, MARKS)
        except InputError as error:
            raise InputError(f"{error}; {ADVICE}") from None
        ids, is_trained = self.encode(PROBE, "two messages")
        if not is_trained.any():
            raise InputError(f"chat template: it does not mark what the assistant says; {ADVICE}")
        said = ids[is_trained].tolist()
        while len(said) > 1 and said[-1] not in tokenizer.special and not tokenizer.decode(said[-1:]).strip():
            said.pop()
        self.turn_end: int = said[-1]

    @classmethod
    def of_recipe(cls, recipe: Recipe, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a recipe; None without conversations. Raises InputError for one that cannot be used."""
        if not recipe.chat_parts:
            return None
        folder = next((path.parent for path in files_to_copy(recipe)), Path(os.devnull))
        names = template_names(folder, tokenizer.end_of_text_token)
        return cls(recipe.chat_parts, template_source(recipe), names, tokenizer)

    def encode(self, text: str, what: str) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return the ids of a conversation, end-of-text last, and which of them are trained on.

        Args:
            text: A document of `corpus.conversation`.
            what: Its name in an error.

        Raises:
            InputError: When the template fails on it or does not write all of it.
        """
        record = record_in(text)
        try:
            if "tool_calls" not in self.source and any(one.get("tool_calls") for one in record["messages"]):
                raise InputError(NOT_WRITTEN.format("a message", "tool_calls"))
            plain, spans = _spans(self._render(record))
            spans = self._trained(record, spans)
        except InputError as error:
            raise InputError(f"{what}: {error}") from None
        encoding = self._tokenizer.encode_with_places(plain)
        ids, places_T2 = np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets).reshape(-1, 2)
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            is_trained |= (places_T2[:, 0] < end) & (places_T2[:, 1] > start)
        if not len(ids) or ids[-1] != self._tokenizer.end_of_text:
            ids, is_trained = np.append(ids, np.uint32(self._tokenizer.end_of_text)), np.append(is_trained, False)
        return ids, is_trained

    def unwritten(self, text: str) -> set[str]:
        """Return options and fields of messages, other than text, that the template does not know."""
        record = record_in(text)
        keys = {key for part in (*record["messages"], record.get(OPTIONS, {})) for key in part}
        return {key for key in keys.difference(SPOKEN, ("role", "train", "weight")) if key not in self.source}

    def _render(self, record: dict[str, Any]) -> str:
        inputs = {key: record[key] for key in ("tools", "documents") if key in record}
        return self._template.render(record["messages"], **record.get(OPTIONS, {}), **inputs)

    def _trained(self, record: dict[str, Any], spans: Spans) -> Spans:
        """Return the spans of messages that are trained on. Raises InputError when the template leaves a string out.

        The record is rendered again with a word after each string, which shows where the string is in the result.
        """
        messages, (probe, words) = record["messages"], _with_words(record)
        text, probed = _spans(self._render(probe))
        found = [(match.start(), words[int(match[1])]) for match in WORD.finditer(text)]
        written = {group for _, (_, _, group) in found}
        if lost := next((word for word in words if word[2] not in written), None):
            field, of, _ = lost
            where = "the record" if of is None else f"a message of the {messages[of]['role']}"
            raise InputError(NOT_WRITTEN.format(where, field))
        out = {number for number, message in enumerate(messages) if not is_trained(message)}
        if not out:
            return spans
        kept: Spans = []
        places = [(place, number in out) for place, (_, number, _) in found if number is not None]
        for number, (start, end) in enumerate(probed):
            before = [is_out for place, is_out in places if place < start][-1:]
            is_out = {is_out for place, is_out in places if start <= place < end} or {*before}
            if len(is_out) > 1 or len(spans) != len(probed):
                raise InputError("the chat template does not say which message is trained on, where not all are")
            kept += [] if True in is_out else [spans[number]]
        return kept


def _with_words(record: dict[str, Any]) -> tuple[dict[str, Any], list[Word]]:
    """Return the record with a word after each string that a template has to write, and what each word stands for."""
    words: list[Word] = []

    def add(value: Any, field: str, number: int | None, part: int | None = None, always: bool = False) -> Any:
        if isinstance(value, list) and part is None:  # of each tool or call something has to be written
            return [add(one, field, number, at, always) for at, one in enumerate(value)]

        def with_word(text: str) -> str:
            if not text.strip() and not always:
                return text
            words.append((field, number, REASONING if field in REASONING else (field, number, part)))
            return f"{text}{NONCE}{len(words) - 1}q"

        return changed(value, with_word)

    messages = [dict(message) for message in record["messages"]]
    for number, message in enumerate(messages):
        for key, value in message.items():  # the name of a tool is that of the call before
            if key in SPOKEN or (key == "name" and message["role"] != "tool"):
                message[key] = add(value, key, number, always=not is_trained(message))
    lists = {key: add(record[key], key, None) for key in record if key in ("tools", "documents")}
    return {**record, **lists, "messages": messages}, words


def _spans(marked: str) -> tuple[str, Spans]:
    """The text without marks, and where what was marked begins and ends in it, in characters."""
    first, *parts = marked.split(MARKS[0])
    text, spans = first, []
    for part in parts:
        said, _, rest = part.partition(MARKS[1])
        spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, spans
