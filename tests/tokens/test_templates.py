"""Published chat templates: ids and masks equal those of `transformers`, or the conversation is rejected with the unwritten
field.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli.chat import Template
from bessemer.common.errors import InputError
from bessemer.corpus.conversation import conversation
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import CHATML, ChatTemplate, default_system, render, template_names

transformers = pytest.importorskip("transformers")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL = [*NAMES.values(), "<|im_start|>", "<|im_end|>"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Wetter für eine <Stadt>", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


user, answer = partial(said, "user"), partial(said, "assistant")
tool = partial(said, "tool", tool_call_id="call12345")


def talk(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]


SAYS = {"tool_calls": call({"city": "Bonn"}), "reasoning_content": "it asks"}
CALLS = answer("", tool_calls=call({"city": "K\u00f6ln", "days": 2}))
SILENT = answer(None, tool_calls=call('{"city": "Bonn"}'))
RECORDS: dict[str, dict[str, Any]] = {
    "short": talk(user("What is 2 + 3?"), answer("5.")),
    "system": talk(said("system", "Be brief."), user("Hi"), answer("Hello!")),
    "turns": talk(user("zw\u00f6lf \u4e16 \U0001f642"), answer(" 1\n\n\U0001f642"), user("  more  "), answer("more")),
    "silent": talk(answer("I begin."), user("a"), answer(""), user("b"), answer("c")),
    "reasoning": talk(user("a?"), answer("b", reasoning_content="let me see")),
    "reasoning as others name it": talk(user("a?"), answer("b", reasoning="let me see\n")),
    "thinking": talk(user("a?"), answer("b", thinking="let me see")),
    "tools that are not called": talk(user("Hi"), answer("Hello"), tools=TOOLS),
    "a call": talk(user("Weather?"), CALLS, tool('{"sky": "grey"}', name="get_weather"), answer("Grey."), tools=TOOLS),
    "a call without content": talk(
        said("system", "Use tools."), user("?"), SILENT, tool("grey"), answer("Grey."), tools=TOOLS
    ),
    "reasoning and a call": talk(
        user("Weather?"), answer("I look.", **SAYS), tool("grey"), answer("Grey."), tools=TOOLS
    ),
    "special tokens in the text": talk(user("Say <|im_end|> </s>"), answer("<|im_end|><s>")),
    "documents": talk(user("Who?"), answer("Ada."), documents=[{"title": "Names", "text": "Ada Lovelace"}]),
    "an option": talk(user("a?"), answer("b"), chat_template_kwargs={"enable_thinking": False}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [json.dumps(record, ensure_ascii=False) for record in RECORDS.values()]
    return Tokenizer.train(texts * 3, 400, "</s>", special_tokens=[one for one in SPECIAL if one != "</s>"])


@pytest.fixture(scope="module")
def theirs(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **NAMES)


def compared(source: str, record: dict[str, Any], tokenizer: Tokenizer, theirs: Any, **names: str) -> str:
    """Return "equal", "refused by both", or the field that the template does not write; fail if ids or masks differ."""
    inputs = {key: record[key] for key in ("tools", "documents") if key in record} | record.get(
        "chat_template_kwargs", {}
    )
    wanted, reason = None, ""
    try:
        wanted = theirs.apply_chat_template(
            record["messages"], chat_template=source, return_dict=True, return_assistant_tokens_mask=True, **inputs
        )
    except Exception as error:
        reason = str(error)
    try:
        text = conversation(record["messages"], record)
        ids, is_trained = ChatTemplate(frozenset({"s"}), source, names or NAMES, tokenizer).encode(text, "it")
    except InputError as error:
        lost = re.search(r"has (\w+), which the chat template does not write", str(error))
        if lost is None and wanted is not None:
            raise AssertionError(f"refused here alone: {error}") from None
        return lost[1] if lost else "refused by both"
    assert wanted is not None, f"refused by transformers alone: {reason}"
    ends = [] if wanted["input_ids"][-1:] == [tokenizer.end_of_text] else [tokenizer.end_of_text]
    assert ids.tolist() == wanted["input_ids"] + ends, (
        tokenizer._inner.decode(ids.tolist()),
        theirs.decode(wanted["input_ids"]),
    )
    assert is_trained.astype(int).tolist() == wanted["assistant_masks"] + [0] * len(ends)
    return "equal"


ANSWER = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    + ANSWER
    + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
ALL = (  # writes every field, each as in a published family
    "{{ bos_token }}{% if tools is not none %}{{ tools | tojson(indent=2, sort_keys=true) }}{% endif %}"
    "{% if documents is not none %}{{ documents | tojson(ensure_ascii=true, separators=(',', ':')) }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}/no_think{% endif %}{{ strftime_now('%Y') }}\n"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{% if m.reasoning_content is defined and loop.index0 > ns.last %}<think>{{ m.reasoning_content | trim }}</think>"
    "{% endif %}{{ m.content | default('') | trim }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for m in messages %}{{ m.role }}:{% if m.thinking %}({{ m.thinking }}){% endif %}" + ANSWER + "{% endfor %}"
)
IDS = (  # refers to calls by their ids, where Kimi K2 has the names
    "{{ tools }}{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls %}{{ c.id }}({{ c.function.arguments }}){% endfor %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}:" + ANSWER + "{% endfor %}"


@pytest.mark.parametrize("name", RECORDS)
def test_a_template_that_writes_every_field_gives_the_ids_of_transformers(
    name: str, tokenizer: Tokenizer, theirs: Any
) -> None:
    assert compared(ALL, RECORDS[name], tokenizer, theirs) == "equal"


RESULTS: dict[str, dict[str, str]] = {
    CHATML: dict.fromkeys(("turns", "system", "silent"), "equal"),
    TURNS: dict.fromkeys(("turns", "special tokens in the text"), "equal")
    | {"reasoning": "reasoning_content", "reasoning as others name it": "reasoning", "thinking": "thinking"}
    | {"documents": "documents", "tools that are not called": "tools"}
    | dict.fromkeys(("a call", "reasoning and a call"), "tool_calls"),
    NO_SYSTEM: {"system": "content", "turns": "equal"},
    IDS: {"a call": "equal"},
    GPT_OSS: dict.fromkeys(("reasoning", "reasoning as others name it", "thinking"), "equal"),
    "{{ raise_exception('no') }}" + TURNS: {"short": "refused by both"},
}


@pytest.mark.parametrize(
    ("source", "name", "result"), [(source, *row) for source, rows in RESULTS.items() for row in rows.items()]
)
def test_fields_that_a_template_does_not_write_are_errors(
    source: str, name: str, result: str, tokenizer: Tokenizer, theirs: Any
) -> None:
    assert compared(source, RECORDS[name], tokenizer, theirs) == result


def test_a_template_must_write_the_names_of_speakers_but_not_of_tools(tokenizer: Tokenizer, theirs: Any) -> None:
    named = talk(user("a", name="Ada"), answer("b"))
    assert compared(TURNS, named, tokenizer, theirs) == "name"
    assert (
        compared("{% for m in messages %}{{ m.name }}:" + ANSWER + "{% endfor %}", named, tokenizer, theirs) == "equal"
    )
    timed = talk(tool("a", name="clock"), answer("b"))
    assert compared(TURNS, timed, tokenizer, theirs) == "equal"
    template = ChatTemplate(frozenset({"s"}), TURNS, {}, tokenizer)
    assert template.unwritten(conversation(timed["messages"])) == {"name", "tool_call_id"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"eos_token": "</s>"}, {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}, None],
)
def test_templates_have_no_bos_if_the_tokenizer_has_none(
    settings: dict[str, Any] | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    if settings is not None:
        written = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    names = template_names(tmp_path, "</s>")
    if settings is None:  # of a model trained here, as in its export
        assert names == dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert names == theirs.special_tokens_map
    source = "{{ bos_token }}{% if bos_token is defined %}B{% endif %}{{ eos_token }}" + TURNS
    ours, _ = render(source, names, RECORDS["short"]["messages"])
    assert ours == theirs.apply_chat_template(RECORDS["short"]["messages"], chat_template=source, tokenize=False)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in %}",
        "{{ raise_exception('no') }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 'a' * 10**13 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_failing_template_is_an_input_error(source: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="chat template: .") as error:
        ChatTemplate(frozenset({"s"}), source, NAMES, tokenizer)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(InputError, match="chat template: ."):
        Template.choose(str(tmp_path / "t.jinja"), tmp_path, tokenizer).render([{"role": "user", "content": "a"}])


def test_an_unreadable_template_file_is_an_input_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    for wanted in (None, str(tmp_path / "chat_template.jinja"), str(tmp_path)):
        with pytest.raises(InputError, match="cannot be read"):
            Template.choose(wanted, tmp_path, tokenizer)


def test_the_default_system_prompt_of_a_template_is_found() -> None:
    user = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    own = "<|im_start|>system\nYou are {{ bos_token }}Q.<|im_end|>\n"
    default = "{% if messages[0].role != 'system' %}" + own + "{% endif %}" + user
    assert default_system(default, {"bos_token": "<s>"}) == "You are <s>Q."
    within = (
        "[{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}]{{ messages[-1].content }}"
    )
    for source in (user, "{% for %}", "{{ raise_exception('no') }}", within):
        assert default_system(source, {}) is None
