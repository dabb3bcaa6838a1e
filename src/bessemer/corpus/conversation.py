"""Conversations as documents: the messages of a record, checked, as JSON. The tokens stage renders them by a chat template.

What edits or judges running text does not apply to them: language, rules, paragraphs and spans. Personal data is replaced within
each message; duplicates and evaluation sets are looked for as in any document.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "developer": "system", "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool",
}  # fmt: skip
# of no text (Unicode 3.2, noncharacters): the tokens stage marks with them who speaks
NO_CHARACTERS = ("\ufdd0", "\ufdd1")
Message = dict[str, Any]


def conversation(value: object) -> str:
    """The messages of a record as JSON: a list of {"role", "content"}, or of ShareGPT's {"from", "value"}; other fields of a
    message, as `tool_calls`, are kept for the template. Raises ValueError with what is wrong."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"not a list of messages but {'an empty one' if value == [] else type(value).__name__}")
    messages = [_message(message, number) for number, message in enumerate(value, 1)]
    said = [one for one in messages if one["role"] == "assistant" and (one["content"].strip() or one.get("tool_calls"))]
    if not said:
        raise ValueError("the assistant says nothing, so that there is nothing to learn")
    return _as_text(messages)


def pair(questions: list[object], answer: object) -> list[Message]:
    """The messages of a question and its answer. questions: parts of the question, of which empty ones are left out. Raises
    ValueError where a part is not text, or there is no question."""
    if strange := next((part for part in questions if part is not None and not isinstance(part, str)), None):
        raise ValueError(f"a part of the question is {type(strange).__name__}, not text")
    asked = "\n\n".join(part for part in questions if isinstance(part, str) and part.strip())
    if not asked:
        raise ValueError("there is no question")
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def contents(text: str) -> str:
    """What was said in a conversation, as running text."""
    return "\n".join(message["content"] for message in json.loads(text) if message["content"])


def with_contents(text: str, change: Callable[[str], str]) -> str:
    """A conversation with the content of each message changed."""
    messages: list[Message] = json.loads(text)
    return _as_text([{**one, "content": change(one["content"]) if one["content"] else ""} for one in messages])


def with_strings(text: str, change: Callable[[str], str]) -> str:
    """A conversation with every string of its messages changed: contents, reasoning, arguments of tools."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(one) for name, one in value.items()}
        return [*map(changed, value)] if isinstance(value, list) else change(value) if isinstance(value, str) else value

    return _as_text(changed(json.loads(text)))


def _message(value: object, number: int) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"message {number} is {type(value).__name__}, not an object with role and content")
    message = dict(value)
    role, content = message.pop("role", message.pop("from", None)), message.pop("content", message.pop("value", None))
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"message {number}: role {role!r} is none of {', '.join(ROLES)}"[:200])
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_text_part(part, number, role) for part in content)
    if not isinstance(content, str):
        kind = "missing" if content is None else f"{type(content).__name__}, not text"
        raise ValueError(f"message {number} (of the {role}): content is {kind}")
    if message.get("weight", 1) != 1:
        raise ValueError(
            f"message {number} (of the {role}): weight = {message['weight']!r} is not understood; take it out"
        )
    if any(mark in content for mark in NO_CHARACTERS):
        raise ValueError(f"message {number} (of the {role}): it holds U+FDD0 or U+FDD1, which are no characters")
    return {"role": role, "content": content, **message}


def _text_part(part: object, number: int, role: str) -> str:
    """The text of one part of a message whose content is a list of parts."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"message {number} (of the {role}): a part of type {kind!r}, where only text is read"[:200])


def _as_text(messages: list[Message]) -> str:
    return json.dumps(messages, ensure_ascii=False)
