"""GGUF files compared with llama.cpp where it is installed, and read with the `gguf` package everywhere."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.export.gguf import (
    ARCHITECTURES,
    GgufIds,
    architecture_of,
    modelfile,
    pre_tokenizer,
    vocabulary_of,
    write_gguf,
)
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer
from bessemer.recipe.model import RopeScaling
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.patterns import GPT2, GPT4, pattern_of
from tests.conftest import WORDS
from tests.model.samples import config, stirred

gguf = pytest.importorskip("gguf")
END = "<|endoftext|>"
ROWS = 351  # rows of the embedding: more than the tokenizer has ids
# Words, contractions of both cases, numbers, code, white space of every kind, other scripts, emoji, control characters.
TEXTS = [
    "The quick brown fox, 1984.", "I'll say it's 12345 and WE'RE not 3.14159", "def f(x):\n\treturn  x  # 3\n\n\n", "   lead and trail   ",
    "a\r\n\r\n b\n  c\t\td", "naïve Straße 東京 Привет مرحبا", "🙂\x07 \u00a0\u2003x", "x = {'a': [1,22,333,4444]}  ... !!!\n", " \n \n", "1 22 333 4444 ½ ²",
    " ".join(WORDS),
]  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "llama tied": {"tie_embeddings": True},
    "llama, rope llama3": {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_length=16)},
    "llama, rope linear": {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    "mistral": {},
    "qwen2": {"tie_embeddings": True},
    "qwen3": {"head_dim": 32},
    "olmo2": {"kv_heads": 4, "tie_embeddings": True},
    "gpt2": {"kv_heads": 4},
    "qwen3_moe": {"experts": 5, "experts_per_token": 2, "expert_width": 96, "head_dim": 32},
    "olmoe": {"experts": 4, "experts_per_token": 3, "expert_width": 64, "kv_heads": 4},
    "mixtral": {"experts": 4, "expert_width": 96},
    "dots1": {"experts": 8, "expert_width": 96, "head_dim": 32, "dense_layers": 1, "router_scale": 2.5},
}


def trained(split: str = GPT4) -> Tokenizer:
    text = [" ".join(WORDS) * 30, Path(__file__).read_text(), *TEXTS]
    return Tokenizer.train(text, 340, END, special_tokens=["<|im_end|>"], regex=split)


def model_of(name: str) -> Transformer:
    family = re.split(r"[ ,]", name)[0]
    options: dict[str, Any] = {"width": 64, "mlp_width": 96, "sequence_length": 64, "vocabulary": ROWS}
    if family in ("gpt2", "olmo2", "olmoe"):
        options["head_dim"] = 16
    return stirred(config(**{**FAMILIES[family].options, **options, **MODELS[name], "family": family})).eval()


def written(
    model: Transformer, tokenizer: Tokenizer, folder: Path, dtype: str = "float32", framed: bool = True
) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    vocabulary = vocabulary_of(folder / "tokenizer.json", model.config.vocabulary)
    ids = GgufIds(
        Framing((tokenizer.end_of_text,) if framed else ()), (tokenizer.end_of_text, 1), tokenizer.end_of_text
    )
    path = folder / f"model-{dtype}.gguf"
    write_gguf(model, lambda name, parameter: parameter.detach(), vocabulary, ids, "small", path, dtype)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0"])
def test_the_file_describes_the_model(dtype: str, tmp_path: Path) -> None:
    model, tokenizer = model_of("qwen3"), trained()
    reader = gguf.GGUFReader(written(model, tokenizer, tmp_path, dtype))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["tokenizer.ggml.pre"] == "llama-bpe"
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.add_bos_token"]) == (0, True)
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"]) == (0, 1)
    assert fields["tokenizer.ggml.tokens"][0] == END and len(fields["tokenizer.ggml.tokens"]) == ROWS
    assert fields["tokenizer.ggml.token_type"][0] == gguf.TokenType.CONTROL
    assert fields["tokenizer.ggml.token_type"][ROWS - 1] == gguf.TokenType.UNUSED
    assert fields["qwen3.attention.key_length"] == 32 and fields["qwen3.context_length"] == 64
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    found = gguf.dequantize(np.asarray(tensors["blk.1.ffn_up.weight"].data), tensors["blk.1.ffn_up.weight"].tensor_type)
    wanted = model.blocks[1].mlp.gate_up[1].detach().numpy()
    error = {"float32": 0.0, "float16": 1e-3, "bfloat16": 1e-2, "q8_0": 2e-2}[dtype] * np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= error
    assert tensors["blk.0.attn_q_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "dots1", "mixtral"])
def test_the_experts_of_a_layer_are_one_tensor(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    config, path = model.config, written(model, trained(), tmp_path)
    reader = gguf.GGUFReader(path)
    fields = {name.rpartition(".")[2]: field.contents() for name, field in reader.fields.items()}
    assert (fields["expert_count"], fields["expert_used_count"]) == (config.experts, config.experts_per_token)
    assert fields["expert_feed_forward_length"] == fields["feed_forward_length"] == config.expert_width
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    experts = model.blocks[1].mlp.experts
    assert np.array_equal(tensors["blk.1.ffn_gate_exps.weight"], experts.gate_up[:, 0].detach().numpy())
    assert np.array_equal(tensors["blk.1.ffn_up_exps.weight"], experts.gate_up[:, 1].detach().numpy())
    assert np.array_equal(tensors["blk.1.ffn_down_exps.weight"], experts.down.detach().numpy())
    assert np.array_equal(tensors["blk.1.ffn_gate_inp.weight"], model.blocks[1].mlp.router.weight.detach().numpy())
    if name == "dots1":
        wanted = {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_gating_func": 2}
        assert (wanted | {"expert_weights_norm": True, "expert_weights_scale": 2.5}).items() <= fields.items()
        assert np.array_equal(tensors["blk.1.exp_probs_b.bias"], model.blocks[1].mlp.router.bias.detach().numpy())
    if name == "qwen3_moe":  # transformers reads no other family with experts, and not the width of an expert
        transformers = pytest.importorskip("transformers")
        settings = transformers.AutoConfig.for_model(**to_hugging_face(config, 0))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=settings)
        ids = torch.arange(48)[None]
        torch.testing.assert_close(theirs(ids).logits, model.logits(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": 3}, "a classifier"),
        ({"family": "qwen3_moe", "router_normalised": False}, "router_normalised = False"),
        ({"family": "bert"}, "an encoder"),
        ({"family": "llama", "activation": "relu2"}, "activation = relu2"),
        ({"family": "llama", "rope_scaling": RopeScaling(kind="yarn", factor=4.0)}, "rope_scaling of kind yarn"),
        ({"family": "gemma2"}, "the family gemma2"),
        ({"family": "mistral", "window": 8}, "sliding windows"),
        ({"family": "qwen3", "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_length=8)}, "rope_scaling of kind llama3"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_computes_differently_are_errors(changes: dict[str, Any], reason: str) -> None:
    options = FAMILIES[changes["family"]].options if "family" in changes else {}
    equal = {"kv_heads": 4, "head_dim": 8} if changes.get("family") == "bert" else {}
    with pytest.raises(InputError, match=reason):
        architecture_of(config(**{**options, **equal, **changes}))


def test_tokenizers_that_llama_cpp_splits_differently_are_errors(tmp_path: Path) -> None:
    for split in (
        pattern_of("gpt4", white_space="indentation"),
        pattern_of("gpt4", "runs"),
        pattern_of("gpt2", white_space="single"),
    ):
        (tmp_path / "tokenizer.json").write_text(trained(split).to_json())
        with pytest.raises(InputError, match=r"tokenizer\.pattern"):
            vocabulary_of(tmp_path / "tokenizer.json", ROWS)
    description: dict[str, Any] = {"model": {"type": "Unigram"}, "added_tokens": []}
    with pytest.raises(InputError, match="byte-level BPE"):
        pre_tokenizer(description)
    prefixed = Tokenizer.train([" ".join(WORDS)], 300, END, prefix_space=True)
    (tmp_path / "tokenizer.json").write_text(prefixed.to_json())
    with pytest.raises(InputError, match="normalizer"):
        vocabulary_of(tmp_path / "tokenizer.json", ROWS)


def test_a_modelfile_has_template_parameters_and_stops() -> None:
    plain = modelfile("m.gguf", 64, [END], {}, None)
    assert plain == f'FROM ./m.gguf\nPARAMETER num_ctx 64\nTEMPLATE """{{{{ .Prompt }}}}"""\nPARAMETER stop "{END}"\n'
    chat = modelfile("m.gguf", 64, [END], {"temperature": 0.6, "top_k": 20}, "<|im_start|>{{ m.role }}")
    assert "PARAMETER temperature 0.6\nPARAMETER top_k 20\n" in chat
    assert '<|im_start|>assistant\n"""' in chat and chat.endswith('PARAMETER stop "<|im_end|>"\n')
    prompted = modelfile("m.gguf", 64, [END], {}, "<|im_start|>{{ m.role }}", "You are a pirate.")
    assert prompted.replace('SYSTEM """You are a pirate."""\n', "") == modelfile(
        "m.gguf", 64, [END], {}, "<|im_start|>{{ m.role }}"
    )
    assert "SYSTEM" not in plain + chat and "SYSTEM" in prompted
    assert "TEMPLATE" not in modelfile("m.gguf", 64, [END], {}, "[INST]")  # Ollama knows it, or the user does


def loaded(path: Path) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed, which runs GGUF files")
    # Keys and values are kept in float32, so that the only difference is the rounding of weights. One token at a time: the matrix
    # units of some machines fail on products of such a small model.
    counts = {"n_ctx": 64, "n_batch": 1, "n_ubatch": 1, "n_threads": 1, "type_k": 0, "type_v": 0}
    return llama_cpp.Llama(str(path), **counts, logits_all=True, verbose=False, flash_attn=False)


@pytest.mark.parametrize("split", [GPT4, pattern_of("gpt4", "single"), GPT2], ids=["llama-bpe", "qwen2", "gpt-2"])
def test_llama_cpp_gives_the_same_ids(split: str, tmp_path: Path) -> None:
    tokenizer = trained(split)
    llama = loaded(written(model_of("llama"), tokenizer, tmp_path))
    for text in TEXTS:
        wanted = tokenizer.encode(text)
        assert llama.tokenize(text.encode(), add_bos=False, special=False) == wanted, text
        assert llama.tokenize(text.encode(), add_bos=True) == [tokenizer.end_of_text, *wanted]
        assert llama.detokenize(wanted).decode() == text
    assert llama.tokenize(f"a<|im_end|>{END}".encode(), add_bos=False, special=True)[-2:] == [1, 0]


@pytest.mark.parametrize("name", list(MODELS))
def test_llama_cpp_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """Compare in float32, on the ids of a text and on ids drawn from the whole vocabulary."""
    model, tokenizer = model_of(name), trained()
    llama = loaded(written(model, tokenizer, tmp_path))
    drawn = torch.randint(0, 340, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    for ids in (llama.tokenize(b"They had not been there at 1984", add_bos=True), drawn):
        llama.reset()
        llama.eval(ids)
        with torch.no_grad():
            wanted = model.logits(torch.tensor([ids]))[0].numpy()
        found = np.asarray(llama.scores[: len(ids)])
        # Its attention rounds keys to f16.
        assert np.abs(found - wanted).max() < 2e-3 * max(1.0, float(np.abs(wanted).max()))


def test_every_architecture_is_tested() -> None:
    assert {re.split(r"[ ,]", name)[0] for name in MODELS} == set(ARCHITECTURES)
