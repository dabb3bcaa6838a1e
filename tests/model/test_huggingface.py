import json
from pathlib import Path

import pytest
import torch

from bessemer.errors import BessemerError
from bessemer.model import huggingface
from bessemer.tokens.tokenizer import Tokenizer
from tests.model.test_decoder import config, stirred

transformers = pytest.importorskip("transformers")
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    made = Tokenizer.train([Path(__file__).read_text()], 300, END)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(made.to_json())
    return path, made


VARIANTS = {
    "qwen3": {},
    "qwen3-tied": {"tie_embeddings": True},
    "llama": {"qk_norm": False},
    "llama-tied-mha": {"qk_norm": False, "tie_embeddings": True, "kv_heads": 4},
    "llama-mqa": {"qk_norm": False, "kv_heads": 1},
    "llama-long": {"qk_norm": False, "rope_theta": 500_000.0, "norm_eps": 1e-5},
    "qwen3-wide-heads": {"head_dim": 24, "rope_theta": 1e6},
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_transformers_gives_the_same_logits_loss_and_gradients(
    name: str, tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300, **VARIANTS[name]))
    sample = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    texts = [(text, made.encode(text)) for text in ("def f(x):\n    return x", f"naïve {END} 🙂")]
    check = huggingface.export(model, path, made.end_of_text, tmp_path / "export", sample, texts)
    assert check.architecture == ("LlamaForCausalLM" if "llama" in name else "Qwen3ForCausalLM")
    assert check.logits_max_difference < 1e-4
    assert check.greedy_tokens_equal == 12
    # In fp64 the two differ by rounding alone, so nothing hides behind the tolerance.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    ours = model.double()
    found, wanted = ours.logits(sample), theirs(sample).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)  # both norm in fp32, whatever the weights
    loss = torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), sample[:, 1:].flatten())
    their_loss = theirs(sample, labels=sample).loss
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), abs=1e-5)
    loss.backward()
    their_loss.backward()
    torch.testing.assert_close(
        ours.embedding.weight.grad, theirs.get_input_embeddings().weight.grad, rtol=1e-3, atol=1e-6
    )
    torch.testing.assert_close(
        ours.blocks[0].mlp.gate_up.grad[0], theirs.model.layers[0].mlp.gate_proj.weight.grad, rtol=1e-3, atol=1e-6
    )


def test_a_wrong_export_is_refused_and_leaves_nothing(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    good = huggingface._config
    monkeypatch.setattr(huggingface, "_config", lambda c, e: {**good(c, e), "rope_theta": 5.0})
    with pytest.raises(
        BessemerError, match=r"the logits of transformers' Qwen3ForCausalLM differ by .*; first in model.layers.0"
    ):
        huggingface.export(model, path, made.end_of_text, tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(huggingface, "_config", good)
    with pytest.raises(BessemerError, match="tokenizer gives other ids"):
        huggingface.export(model, path, made.end_of_text, tmp_path / "export", sample, [("some text", [1, 2])])
    names = dict(huggingface.hugging_face_weights(model))
    swapped = {**names, "model.layers.0.mlp.gate_proj.weight": names["model.layers.0.mlp.up_proj.weight"]}
    honest = huggingface.hugging_face_weights
    monkeypatch.setattr(huggingface, "_write_weights", lambda decoder, folder: _write(swapped, folder))
    monkeypatch.setattr(huggingface, "hugging_face_weights", honest)
    with pytest.raises(BessemerError, match=r"tensor model.layers.0.mlp.gate_proj.weight is not the same"):
        huggingface.export(model, path, made.end_of_text, tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []


def _write(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: weight.detach().clone() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def test_large_exports_are_cut_into_files(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tokenizer
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 30_000)
    model = stirred(config(vocabulary=300))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    huggingface.export(model, path, made.end_of_text, tmp_path / "export", sample, [])
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
