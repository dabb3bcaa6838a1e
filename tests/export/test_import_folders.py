"""Folders as they are found: other people's encoders and classifiers, with the names, shards and dtypes of real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bessemer.common.errors import InputError
from bessemer.export.import_model import import_model
from bessemer.run.directory import RunDirectory
from tests.conftest import WORDS

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def wordpiece(folder: Path) -> int:
    """BERT's kind of tokenizer, saved as transformers does. Returns its ids."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz",
                  *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), *".,0123456789"]  # fmt: skip
    vocabulary = list(dict.fromkeys(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return len(vocabulary)


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A model of random weights of a class of transformers, saved by it."""
    torch.manual_seed(0)
    vocabulary = wordpiece(folder)
    family = "ModernBert" if kind.startswith("Modern") else "Bert"
    special = (
        {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3} if family == "ModernBert" else {}
    )
    configuration = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **{**SIZES, **special, **settings})
    model = getattr(transformers, kind)(configuration)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder


def old_names(folder: Path) -> None:
    """LayerNorms of the first BERT checkpoints, in one file."""
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    swap = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for old, new in swap.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def unchanged(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2, "this folder is a sharded one"


@pytest.mark.parametrize(
    ("kind", "dtype", "settings", "change"),
    [
        ("BertForMaskedLM", torch.float32, {}, unchanged),
        ("BertForMaskedLM", torch.float16, {}, old_names),
        ("BertForPreTraining", torch.bfloat16, {}, unchanged),
        ("BertForSequenceClassification", torch.float32, {"id2label": {0: "no", 1: "yes", 2: "maybe"}}, unchanged),
        ("ModernBertForMaskedLM", torch.float32, {"local_attention": 8, "global_attn_every_n_layers": 1}, unchanged),
        ("ModernBertForSequenceClassification", torch.float32, {"local_attention": 8, "classifier_pooling": "mean"}, unchanged),
    ],
)  # fmt: skip
def test_encoders_are_imported(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = saved(kind, tmp_path / "theirs", dtype, **settings)
    change(folder)
    run = RunDirectory(tmp_path / "runs" / "x")
    found = import_model(folder, run, "x", str(tmp_path / "runs"))
    assert found.logits_max_difference is not None and found.logits_max_difference < 1e-4 and found.note == ""
    manifest = json.loads((run.tokens / "manifest.json").read_text())
    assert manifest["tokenizer"]["mask_token"] == 4 and manifest["tokenizer"]["end_of_text"] == 3
    assert manifest["labels"] == (list(settings["id2label"].values()) if "id2label" in settings else
                                  ["LABEL_0", "LABEL_1"] if "Classification" in kind else [])  # fmt: skip
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]
    with pytest.raises(InputError, match="holds a run or other files already; choose another name with --name"):
        import_model(folder, run, "x", str(tmp_path / "runs"))


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "vocab.txt")], "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "index.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'), "index.json"),
        (lambda folder: sorted(folder.glob("model-*"))[0].unlink(), "safetensors"),
        (lambda folder: sorted(folder.glob("model-*"))[0].write_bytes(b"x" * 100), "safetensors"),
        (lambda folder: sorted(folder.glob("model-*"))[0].write_text("version https://git-lfs.github.com/spec/v1\noid"), "safetensors"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_one_sentence_and_leaves_nothing(
    change: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    folder = saved("BertForMaskedLM", tmp_path / "theirs")
    change(folder)
    with pytest.raises(InputError, match=file) as caught:
        import_model(folder, RunDirectory(tmp_path / "runs" / "x"), "x", str(tmp_path / "runs"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
