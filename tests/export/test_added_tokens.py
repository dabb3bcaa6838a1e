"""Special tokens added to an imported model: their rows, and commands on the run and its export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bessemer.cli import run_command
from bessemer.tokens.tokenizer import Tokenizer
from tests.conftest import recipe_text, with_model, write_text

transformers = pytest.importorskip("transformers")
IDS = 400
ADDED = ["<|im_start|>", "<|im_end|>"]
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text/ and models of 400 ids: tied with one row per id, untied with 30 spare rows, and an encoder."""
    folder = tmp_path_factory.mktemp("added")
    write_text(folder / "text")
    texts = [path.read_text() for path in sorted((folder / "text").rglob("*.*"))]
    made = Tokenizer.train(texts, IDS, "</s>", special_tokens=["<s>", "<pad>", "<mask>"]).to_json()
    (folder / "tokenizer.json").write_text(made)
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}
    llama = {**LAYERS, **ids, "num_key_value_heads": 2}
    for name, model in {
        "tied": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=IDS, tie_word_embeddings=True, **llama)
        ),
        "padded": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=IDS + 30, **llama)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=IDS + 1, **LAYERS, **ids)),
    }.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.save_pretrained(folder / name)
        names = SPECIAL if name == "bert" else {"eos_token": "</s>", "pad_token": "<pad>"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
        tokenizer.save_pretrained(folder / name)
    return folder


def recipe(place: Path, name: str) -> Path:
    text = recipe_text(place).replace('name = "small"', f'name = "{name}"')
    text = text.replace("vocabulary = 400\n", f"special_tokens = {json.dumps(ADDED)}\n")
    text = with_model(text, f'from = "hf:{name}"')
    text = text.replace("learning_rate = 0.01", "learning_rate = 1e-12").replace("every = 8", "every = 1")
    if name == "bert":
        text = text.replace("[train]\n", '[train]\nobjective = "masked"\n').replace(
            'prompts = ["def "]', "prompts = []"
        )
    (place / f"{name}.toml").write_text(text)
    return place / f"{name}.toml"


# Of the exported weights: those with a row for each token.
ROWS = {
    "tied": ["model.embed_tokens.weight"],
    "padded": ["model.embed_tokens.weight", "lm_head.weight"],
    "bert": ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"],
}
VOCABULARY = {"tied": IDS + 2, "padded": IDS + 30, "bert": IDS + 2}  # spare rows are used first


@pytest.mark.parametrize("name", list(ROWS))
def test_added_tokens_are_initialized_as_the_mean_of_their_pieces(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml, run = recipe(place, name), place / "runs" / name
    constant = "--set", "train.schedule.kind=constant"
    assert run_command(["run", str(toml), *constant, "--set", "train.steps=1"]) == 0, capsys.readouterr().err
    settings = json.loads((run / "export" / "config.json").read_text())
    assert settings["vocab_size"] == VOCABULARY[name]
    before, after = (load_file(folder / "model.safetensors") for folder in (place / name, run / "export"))
    old = Tokenizer.load(place / "tokenizer.json", "</s>")
    for weight in ROWS[name]:
        there, here = before[weight], after[weight]
        assert here.shape == (VOCABULARY[name], *there.shape[1:])
        torch.testing.assert_close(here[:IDS], there[:IDS], rtol=0, atol=1e-6)
        torch.testing.assert_close(here[IDS + 2 :], there[IDS + 2 :], rtol=0, atol=1e-6)
        for number, token in enumerate(ADDED):
            pieces = there[old.encode(token)]
            assert len(pieces) > 3
            torch.testing.assert_close(here[IDS + number], pieces.mean(0), rtol=0, atol=1e-6)
    theirs = transformers.AutoTokenizer.from_pretrained(run / "export")
    assert theirs("".join(ADDED), add_special_tokens=False)["input_ids"] == [IDS, IDS + 1]
    assert theirs("The time is")["input_ids"][-3:] == old.encode("The time is")[-3:] or name == "bert"
    commands: list[list[Any]] = [["evaluate", run, "--set", "evaluate.max_tokens=64"], ["export", run, run / "again"]]
    if name == "padded":
        commands += [["generate", run, "The", "--max-tokens", "3"], ["export", run, run / "gguf", "--to", "gguf"]]
        commands += [["run", toml, *constant, "--set", "train.steps=2"]]
    for command in commands:
        assert run_command(list(map(str, command))) == 0, capsys.readouterr().err
    if name == "padded":
        gguf = pytest.importorskip("gguf")
        fields = gguf.GGUFReader(next((run / "gguf").glob("*.gguf"))).fields
        tokens, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
        assert len(tokens) == VOCABULARY[name] and tokens[IDS : IDS + 2] == ADDED
        assert kinds[IDS : IDS + 2] == [gguf.TokenType.CONTROL] * 2


def test_tokens_that_cannot_be_added_are_errors_before_anything_is_built(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = recipe(place, "tied")
    new = ["--set", "run.name=never", "--set", f"run.dir={tmp_path / 'runs'}"]
    for override in (
        'tokenizer.pattern="gpt2"',
        "tokenizer.sample_bytes=1000",
        f"tokenizer.special_tokens={['</s>', '</s>']}",
    ):
        assert run_command(["run", str(toml), *new, "--set", override]) == 2
    # A run that starts from another run uses its tokenizer unchanged.
    text = toml.read_text()
    (place / "start.toml").write_text(with_model(text, "").replace("[train]\n", f'[train]\nstart = "{place}/tied"\n'))
    shutil.copytree(place / "tied", tmp_path / "other")
    assert run_command(["run", str(place / "start.toml"), *new]) == 2
    assert "train.start" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
