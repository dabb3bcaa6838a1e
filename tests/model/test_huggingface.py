import json
from pathlib import Path

import pytest
import torch

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.huggingface import export as exporting
from bessemer.model.huggingface.config import dropout_keys, written_dropout
from bessemer.model.huggingface.export import ExportFiles, export
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import hub_tensors
from bessemer.recipe import Dropout
from bessemer.tokens.tokenizer import Tokenizer
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    made = Tokenizer.train([Path(__file__).read_text()], 300, END)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(made.to_json())
    return path, made


def test_an_export_is_held_against_transformers(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    """Weights, logits, greedy text and token ids; tests/model/test_parity.py holds every family's numbers."""
    path, made = tokenizer
    model = stirred(config(vocabulary=300))
    sample = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    texts = [(text, made.encode(text)) for text in ("def f(x):\n    return x", f"naïve {END} 🙂")]
    check = export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, texts)
    assert check.architecture == "Qwen3ForCausalLM"
    assert check.logits_max_difference < 1e-4
    assert 12 < check.greedy_tokens_equal <= 3 * 12  # from ids, and from both texts, which may end early
    assert check.texts_equal == 2


def test_an_encoder_is_exported_as_one(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    path, made = tokenizer
    options = FAMILIES["modernbert"].options | {"kv_heads": 4, "head_dim": 8, "window": 8}
    model = stirred(config(vocabulary=300, **options))
    sample = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    dropout = written_dropout(model.config, Dropout(hidden=0.1, attention=0.2))
    check = export(model, ExportFiles(path, made.end_of_text, dropout=dropout), tmp_path / "export", sample, [])
    assert check.architecture == "ModernBertForMaskedLM"
    assert check.greedy_tokens_equal == 0
    assert dropout_keys(tmp_path / "export") == {
        "embedding_dropout": 0.1, "mlp_dropout": 0.1, "attention_dropout": 0.2, "classifier_dropout": 0.0
    }  # fmt: skip
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    for wrong in (1.5, -0.1, True, "0.1"):
        (tmp_path / "config.json").write_text(json.dumps(written | {"mlp_dropout": wrong}))
        with pytest.raises(InputError, match="config.json: mlp_dropout = .* must be a share from 0 to 1"):
            dropout_keys(tmp_path)


def test_options_no_family_has_are_named(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300, logit_soft_cap=30.0))
    with pytest.raises(InputError, match=r"qwen3, the nearest, has no logit_soft_cap = 30.0"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", torch.zeros(1, 4, dtype=torch.long), [])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_export_is_refused_and_leaves_nothing(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    good = exporting.to_hugging_face
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "to_hugging_face", lambda *given: {**good(*given), "rope_theta": 5.0})
        with pytest.raises(BessemerError, match=r"the logits of transformers' Qwen3ForCausalLM differ by"):
            export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BessemerError, match="tokenizer gives other ids"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [("some text", [1, 2])])
    names = {part.name: part.gather() for part in hub_tensors(model)}
    swapped = {**names, "model.layers.0.mlp.gate_proj.weight": names["model.layers.0.mlp.up_proj.weight"]}
    monkeypatch.setattr(exporting, "write_weights", lambda model, folder, **_: _write(swapped, folder))
    with pytest.raises(BessemerError, match=r"tensor model.layers.0.mlp.gate_proj.weight is not the same"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []


def _write(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: weight.detach().clone() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
