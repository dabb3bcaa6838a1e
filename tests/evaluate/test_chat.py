from pathlib import Path

import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.evaluate.chat import Chat, Template
from bessemer.model.generation import Sampling
from bessemer.model.transformer import Transformer
from bessemer.tokens.tokenizer import Tokenizer
from tests.model.samples import config, stirred

END = "<|endoftext|>"
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([Path(__file__).read_text()], 300, END)


def saying(tokenizer: Tokenizer, texts: list[str]) -> Transformer:
    """A model that says the given text, whatever it is asked: its logits are the wanted tokens'."""
    model = stirred(config(vocabulary=tokenizer.vocabulary, sequence_length=256))
    ids = iter([token for text in texts for token in [*tokenizer.encode_marked(text), tokenizer.end_of_text]])

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(ids)), tokenizer.vocabulary).float()

    model.head.logits = logits  # type: ignore[method-assign]
    return model


def test_templates_render_as_documented(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = Template.choose("plain", tmp_path, tokenizer)
    assert plain.render(MESSAGES) == "Be short.\n\nQuestion: Hi\nAnswer: Hello.\nQuestion: Bye\nAnswer:"
    chatml = Template.choose("chatml", tmp_path, tokenizer)
    assert chatml.render(MESSAGES[1:2]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_models_own_template_comes_first_and_equals_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = "{{ bos_token }}{% for m in messages %}\n[{{ m['role'] }}] {{ m['content'] | trim }}{% endfor %}\n  [next]"
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "{END}", "eos_token": "{END}"}}'
    )
    (tmp_path / "chat_template.jinja").write_text(own)
    found = Template.choose(None, tmp_path, tokenizer).render(MESSAGES)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert found == f"{END}[system] Be short.[user] Hi[assistant] Hello.[user] Bye  [next]"


def test_a_reply_ends_at_its_stop_and_never_shows_a_part_of_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = saying(tokenizer, [" Steel.\nQuest for more.\nQuestion: and then?", " Iron."])
    chat = Chat(model, tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling())
    pieces = list(chat.reply("What?", 100))
    assert "".join(pieces) == " Steel.\nQuest for more."
    shown = ""
    for piece in pieces:
        shown += piece
        assert "\nQuestion:".startswith(shown[len(shown.rstrip()) :]) or not shown.endswith("\n")
    assert chat.messages[-1] == {"role": "assistant", "content": "Steel.\nQuest for more."}


def test_what_was_held_back_is_shown_when_a_special_token_ends_the_reply(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = Chat(saying(tokenizer, [" One.\nQue"]), tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling())
    assert "".join(chat.reply("First", 50)) == " One.\nQue"
    template = Template.choose("plain", tmp_path, tokenizer)
    early = Chat(saying(tokenizer, [" A\nAnswer: b\nQuestion: c"]), tokenizer, template, Sampling())
    assert "".join(early.reply("First", 50)) == " A"


def test_a_conversation_that_has_no_room_forgets_its_oldest_turns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = Chat(
        saying(tokenizer, [f" {n}." for n in range(9)]), tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling(),
        system="Be short.",
    )  # fmt: skip
    for number in range(9):
        assert "".join(chat.reply(f"Question number {number} is a long one, with many words", 50)) == f" {number}."
    assert chat.num_forgotten >= 2 and chat.num_forgotten % 2 == 0
    assert len(chat.messages) == 19, "all that was said"
    remembered = tokenizer.decode(chat._prompt())
    assert remembered.startswith("Be short.") and "number 8" in remembered and "number 0" not in remembered


def test_what_cannot_be_done_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a file nor one of plain, chatml"):
        Template.choose("nothing", tmp_path, tokenizer)
    (tmp_path / "reaching.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="chat template"):
        Template.choose(str(tmp_path / "reaching.jinja"), tmp_path, tokenizer).render(MESSAGES)
    chat = Chat(saying(tokenizer, ["a"]), tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling())
    with pytest.raises(InputError, match="the model reads only 256"):
        list(chat.reply("word " * 300, 5))
