"""Conversations: formats, the tokens trained on, and errors. Ids and masks are compared with `transformers`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.conversation import contents, conversation, with_contents
from bessemer.corpus.readers.records import record_of
from bessemer.recipe.corpus import Source
from bessemer.recipe.load import parse
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import CHATML, CHATML_TOKENS, ChatTemplate
from tests.tokens.tokenizer_samples import END, ENDS, every_kind

SOURCES = frozenset({"talk"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([Path(__file__).read_text()], 280, "<|endoftext|>", special_tokens=CHATML_TOKENS)


def test_the_end_of_an_assistant_turn_is_trained_on(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(SOURCES, CHATML, {}, tokenizer)
    ids, is_trained = template.encode(conversation(asked("What is 2 + 3?", "5.")), "it")
    assert template.turn_end == tokenizer.id_of("<|im_end|>") == ids[is_trained][-1]
    assert tokenizer.decode(ids[is_trained].tolist()) == "5."
    # published templates also mark the line break after it
    line = CHATML.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
    assert line != CHATML
    ended = ChatTemplate(SOURCES, line, {}, tokenizer)
    assert (
        ended.turn_end == template.turn_end
        and ended.encode(conversation(asked("What is 2 + 3?", "5.")), "it")[1].sum() == is_trained.sum() + 1
    )


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("text", "text"),
        ([], "list of messages"),
        ([1], "message 1"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"content": "x"}], "message 1"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant"}],
            "message 2",
        ),
        ([{"role": "user", "content": {"text": "x"}}], "content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "image_url",
        ),
        ([{"role": "user", "content": "x"}], "assistant"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}], "assistant"),
        ([{"role": "assistant", "content": "x", "weight": 0}], "assistant"),
        ([{"role": "assistant", "content": "x", "train": False}], "assistant"),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], "weight = 0.5"),
        ([{"role": "user", "content": "x", "train": True}, {"role": "assistant", "content": "x"}], "train = True"),
    ],
)
def test_invalid_conversations_are_rejected_with_a_reason(value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        conversation(value)


def test_other_role_and_field_names_are_read_and_extra_fields_kept() -> None:
    found = json.loads(conversation([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "name": "x"}]))
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    parts = [{"type": "text", "text": "a"}, "b"]
    found = json.loads(
        conversation([{"role": "developer", "content": parts}, {"role": "assistant", "content": parts[:1]}])
    )
    assert found == [{"role": "system", "content": "ab"}, {"role": "assistant", "content": "a"}]
    call = [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    # as in transformers, which leaves out null fields
    assert json.loads(conversation(call)) == [{"role": "assistant", "tool_calls": [{"id": 1}]}]
    assert list(json.loads(conversation([{"name": "x", "value": "b", "from": "gpt"}]))[0]) == [
        "name",
        "content",
        "role",
    ]


def test_contents_change_within_their_messages() -> None:
    text = conversation([{"role": "user", "content": 'a "quoted"\nline'}, {"role": "assistant", "content": "b"}])
    assert contents(text) == 'a "quoted"\nline\nb'
    assert contents(with_contents(text, str.upper)) == 'A "QUOTED"\nLINE\nB'
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"to": ["a@b.c", 1]}}}
    answer = {"role": "assistant", "reasoning": "r", "content": "", "tool_calls": [call], "model": "m"}
    text = conversation([answer], {"tools": [{"name": "f"}]})
    assert contents(text) == "r\nf\na@b.c"
    upper = json.loads(with_contents(text, str.upper))
    assert upper["tools"] == [{"name": "f"}] and upper["messages"][0] == {
        "role": "assistant",
        "reasoning": "R",
        "content": "",
        "model": "m",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "F", "arguments": {"to": ["A@B.C", 1]}}}],
    }


def asked(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TALK, PIRATE, SYSTEM = asked("a", "b"), "Be a pirate.", {"role": "system", "content": "Be a pirate."}
CHAT, PAIRS = {"text_key": "messages"}, {"pair_keys": ("system", "q", "a")}
DEEP = functools.reduce(lambda inner, _: [inner], range(2000), "x")
OPTION = {"chat_template_kwargs": {"thinking": False}}


@pytest.mark.parametrize(
    ("keys", "row", "found"),
    [
        (CHAT, {"tools": [TOOL], "id": 7}, {"messages": TALK, "tools": [TOOL]}),
        (CHAT, {"tools": json.dumps([TOOL])}, {"messages": TALK, "tools": [TOOL]}),
        (CHAT, {"tools": None, "documents": [], "system": "", "functions": []}, TALK),
        (CHAT, {"system": PIRATE}, [SYSTEM, *TALK]),
        (CHAT, {"system_prompt": PIRATE}, [SYSTEM, *TALK]),
        (CHAT, {"system": PIRATE, "messages": [SYSTEM, *TALK]}, [SYSTEM, *TALK]),
        (CHAT, {"documents": [{"text": "x"}]}, {"messages": TALK, "documents": [{"text": "x"}]}),
        (CHAT, OPTION, {"messages": TALK, **OPTION}),
        (CHAT, {"system": "Other.", "messages": [SYSTEM, *TALK]}, "system"),
        (CHAT, {"system": 3}, "content is int"),
        (CHAT, {"tools": "hammer"}, "tools"),
        (CHAT, {"tools": ["f"]}, "tools"),
        (CHAT, {"documents": "x"}, "documents"),
        (CHAT, {"functions": [TOOL]}, "functions"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (CHAT, {"tools": "[1"}, ""),
        (PAIRS, {"system": "Add", "q": "2 and 3", "a": "5"}, asked("Add\n\n2 and 3", "5")),
        (PAIRS, {"system": "Add", "q": "", "a": "5"}, asked("Add", "5")),
        (PAIRS, {"system": "Add", "a": "5"}, asked("Add", "5")),
        (PAIRS, {"q": "q", "a": "a", "tools": [TOOL]}, {"messages": asked("q", "a"), "tools": [TOOL]}),
        (PAIRS, {"system": "", "q": None, "a": "5"}, "question"),
        (PAIRS, {"system": "Add", "q": 3, "a": "5"}, "int"),
        (PAIRS, {"system": "Add", "q": "", "a": 5}, "content is int"),
        (PAIRS, {"system": "Add", "q": "", "a": " "}, "assistant"),
        (PAIRS, {"system": "", "q": "q", "a": DEEP}, ""),
    ],
)
def test_a_record_is_a_conversation_or_is_rejected_with_a_reason(
    keys: dict[str, Any], row: dict[str, Any], found: object
) -> None:
    source = Source(name="talk", format="chat", paths=("x.jsonl",), **keys)
    record = record_of({"messages": TALK, **row} if keys is CHAT else row, "0", 1, "", {}, source)
    if isinstance(found, str):
        assert record.reason == "bad_record" and found in (record.detail or "")
    else:
        assert record.reason is None and json.loads(record.text) == found


MACRO = (  # marks in a macro, a separate end of turn, and another mark without text
    "{% macro answer(m) %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endmacro %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{{ answer(m) }}{% generation %}<|im_end|>{% endgeneration %}{% generation %}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ONE_SPAN = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"


@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
@pytest.mark.parametrize("template", [CHATML, MACRO])
@pytest.mark.parametrize("silent", [(0,), (1,), (2,), (0, 2), (0, 1)])
def test_messages_that_are_not_trained_on(
    tokenizer: Tokenizer, off: dict[str, Any], template: str, silent: tuple[int, ...]
) -> None:
    answers = ["same", "same", " other\n"]
    talk: list[dict[str, Any]] = []
    for number, answer in enumerate(answers):
        more = off if number in silent else {"train": True} if number == 1 else {"weight": 1}
        talk += [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **more}]
    ids, is_trained = ChatTemplate(SOURCES, template, {}, tokenizer).encode(conversation(talk), "it")
    plain, all_trained = ChatTemplate(SOURCES, template, {}, tokenizer).encode(
        conversation([{"role": one["role"], "content": one["content"]} for one in talk]), "it"
    )
    assert ids.tolist() == plain.tolist()
    runs = np.flatnonzero(np.diff(np.concatenate([[0], all_trained.astype(int), [0]]))).reshape(-1, 2)
    assert len(runs) == 3
    for number, (start, end) in enumerate(runs):
        assert is_trained[start:end].tolist() == [number not in silent] * (end - start)
    assert is_trained.sum() == sum(end - start for number, (start, end) in enumerate(runs) if number not in silent)


def test_a_template_without_message_boundaries_is_an_error_unless_all_messages_are_trained_on(
    tokenizer: Tokenizer,
) -> None:
    template = ChatTemplate(SOURCES, ONE_SPAN, {}, tokenizer)
    silent = [{"role": "assistant", "content": "x", "train": False}, {"role": "assistant", "content": "y"}]
    assert template.encode(conversation([{"role": "assistant", "content": "x"}]), "it")[1].any()
    with pytest.raises(InputError, match="it: .*generation"):
        template.encode(conversation(silent), "it")
    with pytest.raises(InputError):
        ChatTemplate(SOURCES, "{% for m in messages %}{{ m.content }}{% endfor %}", {}, tokenizer)


@pytest.mark.parametrize("kind", ["unigram", "bert", "llama", "gpt4"])
@pytest.mark.parametrize(
    "answers",
    [
        ("The red fox.", "For no reason.\n", "It sees  "),
        ("  one\n\n  two  \n", "ok"),
        ("\n ", "x"),
        ("caf\u00e9 \U0001f642", "\u4e16"),
    ],
)
def test_trailing_white_space_is_trained_on(kind: str, answers: tuple[str, ...]) -> None:
    end = ENDS.get(kind, END)
    tokenizer = Tokenizer(every_kind()[kind], end)
    source = "{% for m in messages %}{{ eos_token }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    talk = [
        part for one in answers for part in ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": one})
    ]
    ids, is_trained = ChatTemplate(SOURCES, source, {"eos_token": end}, tokenizer).encode(conversation(talk), "it")
    turn = np.cumsum(ids == tokenizer.end_of_text)
    for number, answer in enumerate(answers):
        inside = (turn == 2 * number + 2) & (ids != tokenizer.end_of_text)
        assert (
            is_trained[inside].all()
            and tokenizer.decode(ids[inside].tolist()).split() == tokenizer.decode(tokenizer.encode(answer)).split()
        )
        assert inside.any() or not answer.strip()
        assert not is_trained[(turn == 2 * number + 1) | (ids == tokenizer.end_of_text)].any()


TOML = """
run = {{ dir = ".", name = "x" }}
tokens = {{ {tokens} }}
corpus.dedup.lines = {lines}
[[corpus.sources]]
name = "talk"
format = "{format}"
paths = ["talk.jsonl"]
"""


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"tokens": "packing = 'concatenate'"},
            "source 'talk' holds conversations .* need tokens.packing = best-fit",
        ),
        ({"tokens": "packing = 'best-fit', document_mask = false"}, "need tokens.document_mask = true"),
        ({"tokens": "packing = 'document', gate = true"}, "need tokens.gate = false"),
        ({"tokens": "packing = 'document'", "lines": "true"}, "dedup.lines is for running text"),
        ({"tokens": "chat_template = 'chatml'", "format": "jsonl"}, "no source has format = chat"),
    ],
)
def test_recipes_that_do_not_fit_conversations_are_errors(
    tmp_path: Path, values: dict[str, str], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        parse(TOML.format(**{"format": "chat", "lines": "false", **values}), tmp_path / "r.toml")
