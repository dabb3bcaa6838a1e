"""Import, then export: the exported folder equals the imported one, file by file and key by key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli import run_command
from bessemer.recipe import load
from bessemer.tokens.tokenizer import Tokenizer
from tests.choose import long_but
from tests.conftest import WORDS, recipe_text, with_model, write_text

transformers = pytest.importorskip("transformers")

SPECIAL = ["<|end|>", "<s>", "<pad>", "<mask>", "<|eot|>", "[CLS]", "[SEP]"]  # ids 0 to 6
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
SMALL = {
    "vocab_size": 341,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2}
DECODER = {**SMALL, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 96}
NAMES = {"id2label": {0: "spam", 1: "ham", 2: "eggs"}, "label2id": {"spam": 0, "ham": 1, "eggs": 2}}
FOLDERS: dict[str, dict[str, Any]] = {
    # bos before each text, a list of eos ids, a separate chat template, bfloat16
    "llama": {
        "class": "LlamaForCausalLM", "config": {**DECODER, "eos_token_id": [0, 4], "rope_theta": 5e5, "tie_word_embeddings": True},
        "frame": (1, None), "dtype": torch.bfloat16, "template": "file",
        "generation": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3, "eos_token_id": [0, 4], "bos_token_id": 1},
    },
    # nothing before a text, the template in tokenizer_config.json, some tensors in float32
    "qwen3": {
        "class": "Qwen3ForCausalLM", "config": {**DECODER, "head_dim": 16}, "frame": (None, None), "dtype": torch.bfloat16,
        "template": "settings", "mixed": True, "generation": {"do_sample": True, "top_k": 20, "eos_token_id": [4, 0]},
    },
    "gpt2": {
        "class": "GPT2LMHeadModel",
        "config": {**TOKENS, "vocab_size": 341, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "summary_type": "mean",
                   "task_specific_params": {"text-generation": {"max_length": 50}}},
        "frame": (None, None), "generation": {"max_length": 40},
    },
    "bert": {
        "class": "BertForMaskedLM", "config": {**SMALL, "max_position_embeddings": 96, "pad_token_id": 2, "hidden_dropout_prob": 0.3},
        "frame": (5, 6),
    },
    "modernbert classifier": {
        "class": "ModernBertForSequenceClassification",
        "config": {**SMALL, **NAMES, "max_position_embeddings": 96, "pad_token_id": 2, "bos_token_id": 5, "eos_token_id": 6, "cls_token_id": 5,
                   "sep_token_id": 6, "local_attention": 8, "classifier_pooling": "mean", "problem_type": "single_label_classification"},
        "frame": (5, 6), "dtype": torch.float16,
    },
    # norms at both ends, soft caps, a window in every other layer
    "gemma2": {
        "class": "Gemma2ForCausalLM",
        "config": {**DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
        "frame": (1, None), "dtype": torch.bfloat16,
    },
    # two kinds of rotary positions, scaled in one layer of two
    "gemma3": {
        "class": "Gemma3ForCausalLM",
        "config": {**DECODER, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2,
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "frame": (1, None),
    },
    # joint projections; generation passes the length from which other factors apply
    "phi3": {
        "class": "Phi3ForCausalLM",
        "config": {**DECODER, "original_max_position_embeddings": 40, "partial_rotary_factor": 0.5,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}},
        "frame": (1, None),
    },
    # positions that begin after the padding token's position and skip it
    "roberta": {
        "class": "RobertaForMaskedLM",
        "config": {**SMALL, "max_position_embeddings": 99, "pad_token_id": 2, "bos_token_id": 5, "eos_token_id": 6, "type_vocab_size": 1},
        "frame": (5, 6),
    },
    # a layer without rotary positions
    "smollm3": {
        "class": "SmolLM3ForCausalLM", "config": {**DECODER, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True},
        "frame": (1, None),
    },
}  # fmt: skip
OURS = {"bessemer.json", "README.md"}  # the checks and the model card; the folder's own card is README-source.md
WEIGHTS = {"model.safetensors"}


def made(name: str, folder: Path) -> None:
    """Write a folder as `transformers` saves it, with files that a user of the hub adds."""
    about = FOLDERS[name]
    kind = getattr(transformers, about["class"])
    torch.manual_seed(0)
    model = kind(kind.config_class(**about["config"])).to(about.get("dtype", torch.float32))
    if about.get("mixed"):
        model.model.norm.float()
    if "generation" in about:
        model.generation_config = transformers.GenerationConfig(**about["generation"])
    model.save_pretrained(folder)
    plain = Tokenizer.train([" ".join(WORDS) * 20], 330, SPECIAL[0], special_tokens=SPECIAL[1:])
    inner = plain._inner
    before, after = about["frame"]
    if before is not None:
        from tokenizers.processors import TemplateProcessing

        ends = [(SPECIAL[number], number) for number in (before, after) if number is not None]
        inner.post_processor = TemplateProcessing(
            single=f"{SPECIAL[before]} $A" + (f" {SPECIAL[after]}" if after else ""),
            pair=f"{SPECIAL[before]} $A {SPECIAL[before]} $B",
            special_tokens=ends,
        )
    tokens = {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>", "mask_token": "<mask>"}
    tokens |= {"cls_token": "[CLS]", "sep_token": "[SEP]"} if after else {}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=77, truncation_side="left", **tokens
    )
    tokenizer.add_tokens(["<tool>", "<|user|>"])
    tokenizer.save_pretrained(folder)
    if about.get("template") == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if about.get("template") == "settings":
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    (folder / "LICENSE").write_text("all rights reserved\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Theirs\n")


def round_trip(folder: Path) -> Path:
    assert run_command(["import", str(folder / "in"), "--dir", str(folder / "runs"), "--name", "again"]) == 0
    assert run_command(["export", str(folder / "runs/again"), str(folder / "out")]) == 0
    return folder / "out"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", list(FOLDERS))
def test_import_and_export_lose_nothing(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "in")
    out = round_trip(tmp_path)
    before = {path.name for path in (tmp_path / "in").iterdir()}
    assert {path.name for path in out.iterdir()} == before | OURS | {"README-source.md"}
    for file in sorted(before - WEIGHTS):
        here = out / ("README-source.md" if file == "README.md" else file)
        raw, again = (tmp_path / "in" / file).read_bytes(), here.read_bytes()
        if file.endswith(".json"):  # key by key, so that a failure names the key
            for key, value in json.loads(raw).items():
                assert json.loads(again)[key] == value, f"{file}: {key}"
        assert again == raw, file
    card = (out / "README.md").read_text()
    assert "license: mit" in card and "imported into Bessemer" in card
    theirs, ours = tensors(tmp_path / "in"), tensors(out)
    assert theirs.keys() == ours.keys()
    for tensor, value in theirs.items():
        assert ours[tensor].dtype == value.dtype, tensor
        assert torch.equal(ours[tensor], value), tensor


def test_an_imported_model_follows_its_folders_conventions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put bos before the prompt, and end the text at any of the eos ids."""
    made("llama", tmp_path / "in")
    assert run_command(["import", str(tmp_path / "in"), "--dir", str(tmp_path / "runs"), "--name", "again"]) == 0
    facts = json.loads((tmp_path / "runs/again/tokens/manifest.json").read_text())["tokenizer"]
    assert (facts["prefix"], facts["suffix"], facts["ends"]) == ([1], [], [0, 4])
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    for prompt in ("the of", "<|user|>they<|eot|>"):
        capsys.readouterr()
        options = ["--temperature", "0", "--max-tokens", "12", "--json"]
        assert run_command(["generate", str(tmp_path / "runs/again"), prompt, *options]) == 0
        ids = read(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.0)
        wanted = read.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert json.loads(capsys.readouterr().out)["text"] == wanted


def test_another_dtype_and_another_run_replace_an_export(tmp_path: Path) -> None:
    """Two imports have the same steps and no text: the weights identify the contents of the folder."""
    made("gpt2", tmp_path / "in")
    out = round_trip(tmp_path)
    first, config = tensors(out), json.loads((out / "config.json").read_text())
    assert run_command(["export", str(tmp_path / "runs/again"), str(out), "--set", "export.dtype=float16"]) == 0
    for name, value in tensors(out).items():
        assert value.dtype == torch.float16 and torch.equal(value, first[name].half())
    again = json.loads((out / "config.json").read_text())
    assert {key for key in config | again if config.get(key) != again.get(key)} == {"dtype"}
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "in")
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(2)
    model.save_pretrained(tmp_path / "in")
    assert run_command(["import", str(tmp_path / "in"), "--dir", str(tmp_path / "other"), "--name", "again"]) == 0
    assert run_command(["export", str(tmp_path / "other/again"), str(out)]) == 0
    assert torch.equal(tensors(out)["transformer.ln_f.weight"], 2 * first["transformer.ln_f.weight"])


# Options that make the small run reach special cases: windows, layers without rotary positions, the original length.
FAMILIES = {
    "gemma3": ("causal", "window = 8\nglobal_every = 2\nkv_heads = 1\n"),
    "phi3": (
        "causal",
        'kv_heads = 1\nrotary_fraction = 0.5\nrope_scaling = { kind = "longrope", factor = 2.0, original_length = 16, '
        "short_factor = [1.0, 1.5, 2.0, 2.5], long_factor = [1.0, 2.0, 3.0, 4.0] }\n",
    ),
    "roberta": ("masked", "kv_heads = 2\n"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_text(folder / "text")
    return folder


@pytest.mark.parametrize("family", long_but(FAMILIES, "gemma3"))
def test_a_family_is_trained_from_scratch_and_from_its_export(
    family: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every export passes the check, which compares it with `transformers`, or the run fails."""
    objective, options = FAMILIES[family]
    text = recipe_text(place).replace('name = "small"', f'name = "{family}"')
    text = text.replace("[train]\n", f'[train]\nobjective = "{objective}"\n')
    own = text.replace("kv_heads = 1\n", f'family = "{family}"\n{options}').replace("= 400", "= 410")
    (place / f"{family}.toml").write_text(own)
    assert run_command(["run", str(place / f"{family}.toml"), "--set", "train.steps=4"]) == 0, capsys.readouterr().err
    export = place / "runs" / family / "export"
    first = json.loads((export / "config.json").read_text())
    further = with_model(text, f'from = "hf:{export}"')
    further = further.replace("vocabulary = 400", f'path = "{export}/tokenizer.json"')
    (place / "further.toml").write_text(further.replace(f'name = "{family}"', f'name = "{family}-further"'))
    assert run_command(["run", str(place / "further.toml"), "--set", "train.steps=1"]) == 0, capsys.readouterr().err
    assert json.loads((place / "runs" / f"{family}-further" / "export" / "config.json").read_text()) == first


def test_a_tokenizer_that_transformers_changes_is_an_error_before_the_corpus_is_built(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' Qwen2 splits digits one by one and composes characters, whatever tokenizer.json says."""
    from transformers import AutoTokenizer

    text = (
        recipe_text(place)
        .replace('name = "small"', 'name = "qwen"')
        .replace("[model]\n", '[model]\nfamily = "qwen2"\n')
    )
    (place / "qwen.toml").write_text(text)
    sets = ["--set", "train.steps=2"]
    for command in ("run", "train"):
        assert run_command([command, str(place / "qwen.toml"), *sets]) == 2
        error = capsys.readouterr().err
        assert "take another tokenizer.pattern" in error
    assert not (place / "runs" / "qwen" / "corpus").exists()
    assert run_command(["run", str(place / "qwen.toml"), *sets, "--set", "tokenizer.pattern=qwen2"]) == 0
    run = place / "runs" / "qwen"
    theirs, ours = AutoTokenizer.from_pretrained(run / "export"), load(run)
    for odd in ("In 1984 and 2024", "cafe\u0301", "a\r\nb \u3000", "ÅＡﬁ"):
        wanted = Tokenizer.load(run / "tokens" / "tokenizer.json", ours.tokenizer.end_of_text).encode(odd)
        assert theirs(odd, add_special_tokens=False)["input_ids"] == wanted
