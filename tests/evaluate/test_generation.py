from pathlib import Path

import pytest
import torch

from bessemer.cli.chat import Chat, Template
from bessemer.common.errors import InputError
from bessemer.model.attention_scope import Documents
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer, build_model
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.generation import Sampling, choose, generate
from tests.model.samples import BLOCKS, config, stirred

VARIANTS = {
    "qwen3": {},
    "olmo2": {**FAMILIES["olmo2"].options, "head_dim": 8},
    "gpt2": {**FAMILIES["gpt2"].options, "kv_heads": 4, "head_dim": 8},
    "windowed": {"window": 5, "global_every": 2},
    "soft caps": {"attention_soft_cap": 2.0, "logit_soft_cap": 3.0},
    **BLOCKS,
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_cache_does_not_change_greedy_text(name: str) -> None:
    """Greedy text with the key-value cache equals that of whole forward passes."""
    model = stirred(config(**VARIANTS[name]))
    prompt = [5, 17, 3]
    found = list(generate(model, prompt, max_tokens=21, sampling=Sampling()))
    text = list(prompt)
    with torch.no_grad():
        for _ in range(21):
            text.append(int(model.logits(torch.tensor([text]))[0, -1].argmax()))
    assert found == text[3:]


def test_past_its_positions_a_model_continues_from_the_later_half() -> None:
    model = stirred(config(sequence_length=8))
    found = list(generate(model, [1, 2, 3], max_tokens=12, sampling=Sampling()))
    held = [1, 2, 3]
    with torch.no_grad():
        for token in found:
            if len(held) == 9:  # eight positions are used, and the ninth token is next
                held = held[-4:]
            assert token == int(model.logits(torch.tensor([held]))[0, -1].argmax())
            held.append(token)
    assert len(found) == 12


def test_generation_ends_before_the_end_of_text() -> None:
    model = stirred(config())
    found = list(generate(model, [1], max_tokens=20, sampling=Sampling()))
    ending = found[3]
    stopped = list(generate(model, [1], max_tokens=20, sampling=Sampling(), ends=(ending,)))
    assert stopped == found[: found.index(ending)]


def drawn(logits: list[float], sampling: Sampling, draws: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = [choose(torch.tensor(logits), sampling, generator) for _ in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


PROBABILITY = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITY.log().tolist()


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(1.0), PROBABILITY),
        (Sampling(0.5), PROBABILITY**2 / (PROBABILITY**2).sum()),
        (Sampling(1.0, top_k=2), torch.tensor([0.625, 0.375, 0, 0])),
        (Sampling(1.0, top_p=0.8), torch.tensor([0.625, 0.375, 0, 0])),  # 0.5 + 0.3 reaches 0.8
        (Sampling(1.0, top_p=0.81), torch.tensor([10, 6, 3, 0]) / 19),
        (Sampling(1.0, top_p=0.01), torch.tensor([1.0, 0, 0, 0])),
        (Sampling(1.0, top_k=3, top_p=0.6), torch.tensor([0.625, 0.375, 0, 0])),
        (Sampling(0.0), torch.tensor([1.0, 0, 0, 0])),
    ],
)
def test_tokens_are_drawn_by_temperature_and_top_p(sampling: Sampling, wanted: torch.Tensor) -> None:
    found = drawn(LOGITS, sampling)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.03)
    assert torch.equal(found > 0, wanted > 0)


def test_wrong_settings_are_errors() -> None:
    for settings in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(InputError, match=next(iter(settings))):
            Sampling(**settings)  # type: ignore[arg-type]


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (dict(build_model(config(), seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    # A deeper model has the same initial values in the tensors that both have.
    deeper = dict(build_model(config(layers=3), 0).named_parameters())
    assert all(torch.equal(first[name], deeper[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_document_mask_on_cuda_equals_the_one_on_cpu() -> None:
    wanted = config(head_dim=32, sequence_length=256)
    model = stirred(wanted)
    tokens = torch.randint(0, 97, (2, 256), generator=torch.Generator().manual_seed(5))
    on_cpu = model.logits(tokens, Documents.from_tokens(tokens, 0))
    cuda = tokens.cuda()
    on_cuda = model.cuda().logits(cuda, Documents.from_tokens(cuda, 0))
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=0, atol=1e-4)


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
    """A model that returns the given text for any prompt: its logits favour the wanted tokens."""
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


def test_held_back_text_is_shown_when_a_special_token_ends_the_reply(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = Chat(saying(tokenizer, [" One.\nQue"]), tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling())
    assert "".join(chat.reply("First", 50)) == " One.\nQue"
    template = Template.choose("plain", tmp_path, tokenizer)
    early = Chat(saying(tokenizer, [" A\nAnswer: b\nQuestion: c"]), tokenizer, template, Sampling())
    assert "".join(early.reply("First", 50)) == " A"


def test_a_conversation_that_is_too_long_drops_its_oldest_turns(tokenizer: Tokenizer, tmp_path: Path) -> None:
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


def test_unusable_models_and_prompts_are_errors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--template"):
        Template.choose("nothing", tmp_path, tokenizer)
    (tmp_path / "reaching.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InputError, match="chat template"):
        Template.choose(str(tmp_path / "reaching.jinja"), tmp_path, tokenizer).render(MESSAGES)
    chat = Chat(saying(tokenizer, ["a"]), tokenizer, Template.choose("plain", tmp_path, tokenizer), Sampling())
    with pytest.raises(InputError, match="256"):
        list(chat.reply("word " * 300, 5))
