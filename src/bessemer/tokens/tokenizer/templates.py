"""Chat templates: read from a folder, rendered by Jinja as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.errors import InputError
from bessemer.corpus.conversation import REASONING
from bessemer.storage import hub
from bessemer.tokens.tokenizer.files import CHAT_TEMPLATE, read_table

if TYPE_CHECKING:
    from jinja2 import Environment

CHATML = (  # the layout of Qwen and SmolLM
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def template_names(folder: Path, end_of_text: str) -> dict[str, str]:
    """Return special tokens by their names in chat templates, as `transformers` reads them from the settings in a folder.

    Without settings they are those of an exported model that was trained here.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= {key: value for key, value in read_table(folder / name).items() if value}
    if not settings:
        return dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text)
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: content for key, content in named.items() if key.endswith("_token") and isinstance(content, str)}


def read_template(path: Path, key: str = "chat template") -> str:
    """Return the text of a template file. Raises InputError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key}: {path}: cannot be read: {error}") from None


def chat_template(folder: Path) -> str | None:
    """The chat template of a folder, the default one of several; None where it has none."""
    if (path := hub.foreign_file(folder, CHAT_TEMPLATE)).exists():
        return read_template(path)
    found = read_table(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def template_environment(marks: tuple[str, str] = ("", "")) -> Environment:
    """Jinja as `transformers` configures it for chat templates. marks: put around what the assistant says."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} stands around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment


class JinjaTemplate:
    """A compiled chat template. Raises InputError for one that does not compile."""

    def __init__(self, source: str, names: Mapping[str, str], marks: tuple[str, str] = ("", "")) -> None:
        try:
            self._template = template_environment(marks).from_string(source)
        except Exception as error:  # beside jinja's own, what Python's parser raises
            line = getattr(error, "lineno", None)
            raise InputError(f"chat template: {f'line {line}: ' if line else ''}{_reason(error)}") from None
        self._names = names

    def render(self, messages: Sequence[Mapping[str, Any]], /, **inputs: Any) -> str:
        """Return messages as text, with the inputs that `transformers` gives a template.

        Args:
            inputs: `add_generation_prompt`, `tools`, `documents` and options of the template.

        Raises:
            InputError: When the template fails.
        """
        inputs = {"tools": None, "documents": None, "add_generation_prompt": False, **self._names, **inputs}
        try:
            return self._template.render(messages=[_with_reasoning(one) for one in messages], **inputs)
        except Exception as error:  # a template is a program
            raise InputError(f"chat template: {_reason(error)}") from None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under each name that templates know."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def default_system(source: str, names: Mapping[str, str]) -> str | None:
    """Return the system prompt that a chat template writes by default; None where it writes none."""
    user, mark = {"role": "user", "content": "a"}, "\ufdd0"
    try:
        template = JinjaTemplate(source, names)
        plain = template.render([user])
        before, _, after = template.render([{"role": "system", "content": mark}, user]).partition(mark)
    except InputError:
        return None
    is_there = before and after and plain.startswith(before) and plain.endswith(after)
    return plain[len(before) : -len(after)] or None if is_there else None
