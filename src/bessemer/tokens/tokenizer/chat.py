"""Chat templates: render conversations with `transformers` and encode them to tokens.

A template marks the assistant's text by {% generation %}...{% endgeneration %}; the loss includes only these tokens.
Ids and mask equal those of `transformers`: apply_chat_template(..., return_assistant_tokens_mask=True).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import InputError, first_line, require_import
from bessemer.corpus.conversation import OPTIONS, REASONING, SPOKEN, changed, is_trained, record_in
from bessemer.storage import hub
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.files import CHAT_TEMPLATE, token_settings
from bessemer.tokens.tokenizer.tokenizer import Ids

MARK = "endgeneration"  # in templates that mark the assistant's text
Spans = list[tuple[int, int]]
# A marker word after a string: its field, its message (None: the record), and the group of which one must be written.
Word = tuple[str, int | None, object]
NONCE = f"w{secrets.token_hex(4)}x"  # random, so that no text contains it
WORD = re.compile(NONCE + r"(\d+)q")
PROBE = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
NOT_WRITTEN = "{} has {}, which the chat template does not write"
ADVICE = (
    "set tokens.chat_template to chatml or to a file that puts the assistant's text between "
    "{% generation %} and {% endgeneration %}"
)
CHATML = (  # the format of Qwen and SmolLM
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def template_names(folder: Path, end_of_text: str) -> dict[str, str]:
    """Return the special tokens of a tokenizer's folder, by their names in chat templates, such as eos_token.

    They are read from the tokenizer's settings, as `transformers` does. Without settings, bos_token, eos_token and pad_token
    are all `end_of_text`.
    """
    settings = token_settings(folder) or dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text)
    return {key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)}


def read_template(path: Path, key: str = "chat template") -> str:
    """Return the text of a template file. Raises InputError, which names `key`, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key}: {path}: cannot be read: {error}") from None


def chat_template(folder: Path) -> str | None:
    """Return the chat template in a tokenizer's folder, the default one if it has several; None without one."""
    if (path := hub.foreign_file(folder, CHAT_TEMPLATE)).exists():
        return read_template(path)
    template = token_settings(folder).get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def render(
    source: str, names: Mapping[str, str], messages: Sequence[Mapping[str, Any]], /, **inputs: Any
) -> tuple[str, Spans]:
    """Render messages as text with a chat template, and locate the text of the assistant in it.

    Args:
        source: The template, in Jinja.
        names: The special tokens by their names in the template, such as eos_token.
        messages: The conversation.
        inputs: `add_generation_prompt`, `tools`, `documents` and other variables of the template.

    Returns:
        The text, and the (start, end) in characters of each part that the template marks with {% generation %}.

    Raises:
        InputError: When the template does not compile or fails.
    """
    with require_import("chat templates need transformers; install it with: pip install 'bessemer[train]'"):
        from transformers.utils.chat_template_utils import render_jinja_template
    is_marked, talk = MARK in source, [_with_reasoning(one) for one in messages]
    try:
        texts, spans = render_jinja_template(
            [talk], chat_template=source, return_assistant_tokens_mask=is_marked, **{**names, **inputs}
        )
    except Exception as error:  # a template is a program
        line = getattr(error, "lineno", None)
        raise InputError(f"chat template: {f'line {line}: ' if line else ''}{first_line(error)[:300]}") from None
    return texts[0], spans[0] if is_marked else []


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning, if any, in both fields that templates use: thinking and reasoning_content."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def default_system(source: str, names: Mapping[str, str]) -> str | None:
    """Return the system prompt that a chat template writes by default; None if it writes none."""
    user, mark = {"role": "user", "content": "a"}, "\ufdd0"
    try:
        plain, _ = render(source, names, [user])
        before, _, after = render(source, names, [{"role": "system", "content": mark}, user])[0].partition(mark)
    except InputError:
        return None
    is_there = before and after and plain.startswith(before) and plain.endswith(after)
    return plain[len(before) : -len(after)] or None if is_there else None


class TemplateSource(NamedTuple):
    """The chat template with which the tokens of a run are built.

    Attributes:
        sources: Names of the sources whose documents are conversations.
        source: The template, in Jinja.
        names: The special tokens by their names in the template, such as eos_token.
    """

    sources: frozenset[str]
    source: str
    names: dict[str, str]


class ChatTemplate:
    """A chat template that encodes conversations and finds the tokens that are trained on: those of the assistant.

    Attributes:
        source: The template, in Jinja.
        turn_end: Id of the last token of an assistant's turn, ignoring white space.
    """

    def __init__(self, sources: frozenset[str], source: str, names: dict[str, str], tokenizer: Tokenizer) -> None:
        self.source, self._names, self._tokenizer = source, names, tokenizer
        ids, is_trained = self.encode(PROBE, "two messages")
        if not is_trained.any():
            raise InputError(f"chat template: the assistant's text is not marked; {ADVICE}")
        answer = ids[is_trained].tolist()
        while len(answer) > 1 and answer[-1] not in tokenizer.special and not tokenizer.decode(answer[-1:]).strip():
            answer.pop()
        self.turn_end: int = answer[-1]

    def encode(self, text: str, what: str) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Encode a conversation.

        Args:
            text: The conversation as JSON, in the form of `corpus.conversation`.
            what: Name of the document in errors.

        Returns:
            The ids, end-of-text last, and a mask that is True for the ids that are trained on.

        Raises:
            InputError: When the template fails on the conversation or leaves a part of it out.
        """
        record = record_in(text)
        try:
            if "tool_calls" not in self.source and any(one.get("tool_calls") for one in record["messages"]):
                raise InputError(NOT_WRITTEN.format("a message", "tool_calls"))
            plain, spans = self._render(record)
            spans = self._trained(record, spans)
        except InputError as error:
            raise InputError(f"{what}: {error}") from None
        encoding = self._tokenizer.encode_with_offsets(plain)
        ids, places_T2 = np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets).reshape(-1, 2)
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            is_trained |= (places_T2[:, 0] < end) & (places_T2[:, 1] > start)
        if not len(ids) or ids[-1] != self._tokenizer.end_of_text:
            ids, is_trained = np.append(ids, np.uint32(self._tokenizer.end_of_text)), np.append(is_trained, False)
        return ids, is_trained

    def unwritten(self, text: str) -> set[str]:
        """Return the names of options and message fields, other than text, of a conversation that the template ignores.

        `text` is the conversation as JSON.
        """
        record = record_in(text)
        keys = {key for part in (*record["messages"], record.get(OPTIONS, {})) for key in part}
        return {key for key in keys.difference(SPOKEN, ("role", "train", "weight")) if key not in self.source}

    def _render(self, record: dict[str, Any]) -> tuple[str, Spans]:
        inputs = {key: record[key] for key in ("tools", "documents") if key in record}
        return render(self.source, self._names, record["messages"], **record.get(OPTIONS, {}), **inputs)

    def _trained(self, record: dict[str, Any], spans: Spans) -> Spans:
        """Return those of the assistant's `spans` in a rendered conversation whose messages are trained on (`is_trained`).

        To find them, the conversation `record` is rendered again with a marker word after each string. Raises
        InputError if the template leaves a string out.
        """
        messages, (probe, words) = record["messages"], _with_words(record)
        text, probed = self._render(probe)
        marks = [(match.start(), words[int(match[1])]) for match in WORD.finditer(text)]
        written = {group for _, (_, _, group) in marks}
        if lost := next((word for word in words if word[2] not in written), None):
            field, index, _ = lost
            where = "the record" if index is None else f"a message of the {messages[index]['role']}"
            raise InputError(NOT_WRITTEN.format(where, field))
        out = {number for number, message in enumerate(messages) if not is_trained(message)}
        if not out:
            return spans
        kept: Spans = []
        places = [(position, number in out) for position, (_, number, _) in marks if number is not None]
        for number, (start, end) in enumerate(probed):
            before = [is_out for position, is_out in places if position < start][-1:]
            is_out = {is_out for position, is_out in places if start <= position < end} or {*before}
            if len(is_out) > 1 or len(spans) != len(probed):
                raise InputError("a {% generation %} block mixes trained and other messages; give each a block")
            kept += [] if True in is_out else [spans[number]]
        return kept


def _with_words(record: dict[str, Any]) -> tuple[dict[str, Any], list[Word]]:
    """Return a conversation with a marker word after each string that the template must write, and each word's meaning."""
    words: list[Word] = []

    def add(value: Any, field: str, number: int | None, part: int | None = None, always: bool = False) -> Any:
        if isinstance(value, list) and part is None:  # the template must write something of each tool or call
            return [add(one, field, number, at, always) for at, one in enumerate(value)]

        def with_word(text: str) -> str:
            if not text.strip() and not always:
                return text
            words.append((field, number, REASONING if field in REASONING else (field, number, part)))
            return f"{text}{NONCE}{len(words) - 1}q"

        return changed(value, with_word)

    messages = [dict(message) for message in record["messages"]]
    for number, message in enumerate(messages):
        for key, value in message.items():  # a tool message has the name of the preceding call
            if key in SPOKEN or (key == "name" and message["role"] != "tool"):
                message[key] = add(value, key, number, always=not is_trained(message))
    lists = {key: add(record[key], key, None) for key in record if key in ("tools", "documents")}
    return {**record, **lists, "messages": messages}, words
