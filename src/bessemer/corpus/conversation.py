"""Conversations as documents: checked messages in JSON, which the tokens stage renders by a chat template.

A document is a list of messages, or an object with the list under `messages` and other inputs of the template.

Filters that edit or judge running text skip conversations: language, rules, repeated lines. Personal data is replaced within
each message. Duplicates and evaluation sets are found as in any document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "developer": "system", "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool",
}  # fmt: skip
OTHER_KEYS = {"from": "role", "value": "content"}  # keys of a message in ShareGPT's format
SYSTEM_KEYS = ("system", "system_prompt")  # fields of a record with a system message
OPTIONS = "chat_template_kwargs"  # field of a record with more inputs of the template
REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers uses the first that is present
# Fields of a message that hold its text
SPOKEN = ("content", *REASONING, "tool_calls", "function_call", "refusal")
LABELS = ("id", "type", "index")  # keys in these fields whose values are not text
Message = dict[str, Any]


def conversation(value: object, record: Mapping[str, Any] | None = None) -> str:
    """Check the conversation in a record and return it as JSON text.

    The JSON is the list of messages, or an object with `messages` and the template's other inputs if `record` has any.

    Args:
        value: A list of messages {"role", "content"}, or {"from", "value"} in ShareGPT's format. Other fields of a
            message are kept for the chat template.
        record: The other fields of the record. `tools`, `documents` and `chat_template_kwargs` are passed to the
            template. `system` or `system_prompt` becomes the first message. Further fields are ignored.

    Raises:
        ValueError: The conversation is invalid; the error's text tells why.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, got {str(value)[:60]!r}")
    messages = [_message(message, number) for number, message in enumerate(value, 1)]
    if not any(_says(one) and is_trained(one) for one in messages if one["role"] == "assistant"):
        raise ValueError("no message of the assistant has text to train on")
    record = {key: field for key, field in (record or {}).items() if field not in (None, "", [], {})}
    if "functions" in record:
        raise ValueError("templates do not accept the field functions; rename it to tools")
    for key in (key for key in SYSTEM_KEYS if key in record):
        first = _message({"role": "system", "content": record[key]}, 1)
        if messages[0]["role"] == "system" and messages[0] != first:
            raise ValueError(f"the field {key} and the first message are different system messages; remove one")
        messages = [first, *messages[messages[0] == first :]]
    inputs = {key: _input(key, record[key]) for key in ("tools", "documents", OPTIONS) if key in record}
    return _as_text({"messages": messages, **inputs} if inputs else messages)


def _input(key: str, value: object) -> object:
    """Return the value of a record's field that the chat template reads, parsed if it is JSON text.

    Raises ValueError unless `tools` and `documents` are lists of objects and `chat_template_kwargs` is an object.
    """
    data = json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    options = [data] if key == OPTIONS else data
    if not isinstance(options, list) or not all(isinstance(one, dict) for one in options):
        raise ValueError(f"the field {key} must be {'an object' if key == OPTIONS else 'a list of objects'}")
    if key == OPTIONS and not {"messages", "tools", "documents"}.isdisjoint(options[0]):
        raise ValueError(f"the field {key} contains messages, tools or documents; move them to the record")
    return data


def is_trained(message: Message) -> bool:
    """Return whether a message counts in the loss. One with `train` false or a `weight` of 0 does not."""
    return message.get("train") is not False and message.get("weight") != 0


def pair(questions: list[object], answer: object) -> list[Message]:
    """Return a user message with the question and an assistant message with the answer.

    `questions` are the parts of one question, such as an instruction and its input. Parts that are None or blank are
    skipped, and the others are joined by a blank line. Raises ValueError if a part is of another type, or if all are
    skipped.
    """
    if strange := next((part for part in questions if part is not None and not isinstance(part, str)), None):
        raise ValueError(f"a part of the question is {type(strange).__name__}; expected text")
    question = "\n\n".join(part for part in questions if isinstance(part, str) and part.strip())
    if not question:
        raise ValueError("the question is empty")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def record_in(text: str) -> dict[str, Any]:
    """Parse a conversation's JSON text, a list of messages or an object, and return an object with `messages`.

    The object may have other inputs of the chat template, such as `tools`.
    """
    data = json.loads(text)
    return {"messages": data} if isinstance(data, list) else data


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to each string in it, at any depth, except those under the keys LABELS.

    LABELS are the keys of ids and types.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed(one, change) for one in value]
    if isinstance(value, dict):
        return {key: one if key in LABELS else changed(one, change) for key, one in value.items()}
    return value


def strings(value: object) -> list[str]:
    """Return all strings in a JSON value, at any depth, except those under the keys LABELS.

    LABELS are the keys of ids and types.
    """
    texts: list[str] = []
    changed(value, lambda part: texts.append(part) or part)  # type: ignore[func-returns-value]
    return texts


def contents(text: str) -> str:
    """Return the text of a conversation in JSON: contents, reasoning and tool calls, joined by line breaks."""
    fields = [one[key] for one in record_in(text)["messages"] for key in SPOKEN if key in one]
    return "\n".join(part for part in strings(fields) if part)


def with_contents(text: str, change: Callable[[str], str]) -> str:
    """Return a conversation's JSON with `change` applied to each string of contents, reasoning and tool calls."""
    record = record_in(text)
    for message in record["messages"]:
        for key in message.keys() & {*SPOKEN}:
            message[key] = changed(message[key], lambda part: change(part) if part else part)
    return _as_text(record if len(record) > 1 else record["messages"])


def with_strings(text: str, change: Callable[[str], str]) -> str:
    """Return a conversation's JSON with `change` applied to every string except those under the keys LABELS.

    LABELS are the keys of ids and types.
    """
    return _as_text(changed(json.loads(text), change))


def _says(message: Message) -> bool:
    fields = [message.get(key) for key in SPOKEN]
    return any(one.strip() if isinstance(one, str) else one for one in fields)


def _message(value: object, number: int) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"message {number} is {type(value).__name__}, not an object with role and content")
    names = {key: name for key, name in OTHER_KEYS.items() if name not in value}
    message: Message = {str(names.get(key, key)): one for key, one in value.items() if one is not None}
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"message {number}: role {role!r} is unknown; use one of {', '.join(ROLES)}"[:200])
    message["role"], where = role, f"message {number} (of the {role})"
    if isinstance(content := message.get("content", ""), list):
        content = message["content"] = "".join(_text_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: content is {type(content).__name__}, not text")
    if "content" not in message and not _says(message):
        raise ValueError(f"{where}: content is missing")
    train, weight = message.get("train", True), message.get("weight", 1)
    if not isinstance(train, bool) or weight not in (0, 1) or (train and "train" in message and role != "assistant"):
        raise ValueError(
            f"{where}: train = {train!r}, weight = {weight!r}: set train to true (assistant only) or false, weight to 0 or 1"
        )
    return message


def _text_part(part: object, where: str) -> str:
    """Return the text of one element of a message's `content` list.

    Raises ValueError if the element is not text. `where` names the message in the error.
    """
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: a part of type {kind!r}, where only text is read"[:200])


def _as_text(conversation: object) -> str:
    return json.dumps(conversation, ensure_ascii=False)
