"""Conversations to tokens: the chat template, and which of the tokens the assistant said.

A template marks what the assistant says by {% generation %}...{% endgeneration %}; the loss is of these tokens alone. Ids and
mask are those of `transformers`: apply_chat_template(..., return_assistant_tokens_mask=True).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.conversation import NO_CHARACTERS
from bessemer.errors import InputError
from bessemer.hashing import digest
from bessemer.recipe import Recipe
from bessemer.terminal import counted, warn
from bessemer.tokens.pretrained import (
    CHATML,
    chat_template,
    folder_of,
    template_environment,
    template_error,
    template_names,
)
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Ids, Tokenizer

MARKS = NO_CHARACTERS  # around what the assistant says
PROBE = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
ADVICE = (
    "name a template by tokens.chat_template, a file or chatml, in which what the assistant says stands between "
    "{% generation %} and {% endgeneration %}"
)


def template_source(recipe: Recipe) -> str:
    """The text of the template: of the file that the recipe names, of the tokenizer's folder, else ChatML. Raises InputError."""
    named = recipe.tokens.chat_template
    if named not in (None, "chatml"):
        try:
            return Path(str(named)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InputError(f"tokens.chat_template: {named}: cannot be read: {reason}") from None
    own = None
    if named is None and recipe.tokenizer.path is not None:
        own = chat_template(folder_of(recipe.tokenizer.path))
    return CHATML if own is None else own


def chat_digest(recipe: Recipe) -> list[str]:
    """What the tokens of conversations depend on besides the tokenizer; empty without conversations."""
    return [digest(template_source(recipe))] if recipe.chat_parts else []


def chat_line(recipe: Recipe, store: TokenStore) -> str:
    """The end of a line about tokens: how many are trained on, how many conversations are cut; empty without conversations."""
    packed = store.manifest.get("packing", {})
    if not (names := recipe.chat_parts & set(store.sources)) or "sources" not in packed:
        return ""
    cut = sum(packed["sources"][name]["train"]["documents_cut"] for name in names)
    share = f"; {packed['targets'] / max(store.train_tokens, 1):.0%} of the tokens are trained on"
    return share + (f"; {counted(cut, 'conversation')} longer than a sequence cut" if cut else "")


def report_refused(refused: int, taken: int, first: str) -> None:
    """Warn of conversations that the template refuses, and raise InputError where it refuses most. first: the reason for one."""
    said = f"{refused:,} of {counted(refused + taken, 'conversation')} left out, as the chat template refuses them; {first}"
    if refused > taken:
        raise InputError(f"{said}; give a template that takes them by tokens.chat_template")
    warn(said)


class ChatTemplate:
    """Renders conversations. sources: the names under which they are stored; source: Jinja; names: of special tokens."""

    def __init__(self, sources: frozenset[str], source: str, names: dict[str, str], tokenizer: Tokenizer) -> None:
        if (error := template_error(source)) is not None:
            raise InputError(f"chat template: {error}; {ADVICE}")
        self.sources, self.source, self._names, self._tokenizer = sources, source, names, tokenizer
        self._template = template_environment(MARKS).from_string(source)
        self._writes_calls = "tool_calls" in source
        ids, is_trained = self.encode(PROBE, "two messages")
        if not is_trained.any():
            raise InputError(f"chat template: it does not mark what the assistant says; {ADVICE}")
        self.turn_end = int(ids[np.flatnonzero(is_trained)[-1]])
        """The last token that the assistant is trained on in a turn."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a recipe; None without conversations. Raises InputError for one that cannot be used."""
        sources, names = recipe.chat_parts, dict.fromkeys(("bos_token", "eos_token"), tokenizer.end_of_text_token)
        if not sources:
            return None
        if recipe.tokenizer.path is not None:
            names |= {key: name for key, name in template_names(folder_of(recipe.tokenizer.path)).items() if name}
        return cls(sources, template_source(recipe), names, tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it is made of: a compiled template is not pickled."""
        return ChatTemplate, (self.sources, self.source, self._names, self._tokenizer)

    def encode(self, text: str, what: str) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """The ids of a conversation (JSON of its messages), end-of-text last, and which of them the assistant said.

        what: names it in an error. Raises InputError where the template refuses it.
        """
        from jinja2 import TemplateError

        messages = json.loads(text)
        if not self._writes_calls and any(message.get("tool_calls") for message in messages):
            raise InputError(
                f"{what}: a message has tool_calls, which the chat template does not write; name one that does by "
                "tokens.chat_template, or take the conversation out"
            )
        try:
            marked = self._template.render(messages=messages, add_generation_prompt=False, **self._names)
        except (TemplateError, TypeError) as error:
            raise InputError(f"{what}: chat template: {error}") from None
        plain, spans = _spans(marked)
        encoding = self._tokenizer.encode_with_places(plain)
        ids = np.array(encoding.ids, dtype=np.uint32)
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            first, last = (encoding.char_to_token(place) for place in (start, end - 1))
            if first is not None and last is not None:
                is_trained[first : last + 1] = True
        if not len(ids) or ids[-1] != self._tokenizer.end_of_text:
            ids, is_trained = np.append(ids, np.uint32(self._tokenizer.end_of_text)), np.append(is_trained, False)
        return ids, is_trained


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where what was marked begins and ends in it, in characters."""
    first, *parts = marked.split(MARKS[0])
    text, spans = first, []
    for part in parts:
        said, _, rest = part.partition(MARKS[1])
        if said:
            spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, spans
