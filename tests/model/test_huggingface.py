import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bessemer.checkpoint import save
from bessemer.common.errors import BessemerError, InputError
from bessemer.export import hugging_face as exporting
from bessemer.export.hugging_face import ExportFiles, export, stream
from bessemer.model.huggingface.config import dropout_keys, export_dropout
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import hub_tensors
from bessemer.model.transformer import meta_model
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


def test_an_encoder_is_exported_as_an_encoder(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    path, made = tokenizer
    options = FAMILIES["modernbert"].options | {"kv_heads": 4, "head_dim": 8, "window": 8}
    model = stirred(config(vocabulary=300, **options))
    sample = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    dropout = export_dropout(model.config, Dropout(hidden=0.1, attention=0.2))
    check = export(model, ExportFiles(path, made.end_of_text, dropout=dropout), tmp_path / "export", sample, [])
    assert check.architecture == "ModernBertForMaskedLM"
    assert check.greedy_tokens_equal == 0
    assert dropout_keys(tmp_path / "export") == {
        "embedding_dropout": 0.1, "mlp_dropout": 0.1, "attention_dropout": 0.2, "classifier_dropout": 0.0
    }  # fmt: skip
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    for wrong in (1.5, -0.1, True, "0.1"):
        (tmp_path / "config.json").write_text(json.dumps(written | {"mlp_dropout": wrong}))
        with pytest.raises(InputError, match="config.json: mlp_dropout = "):
            dropout_keys(tmp_path)


def test_options_no_family_has_are_named(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300, logit_soft_cap=30.0))
    with pytest.raises(InputError, match=r"qwen3.*logit_soft_cap.*30\.0"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", torch.zeros(1, 4, dtype=torch.long), [])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_export_is_an_error_and_leaves_nothing(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    good = exporting.to_hugging_face
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "to_hugging_face", lambda *given: {**good(*given), "rope_theta": 5.0})
        with pytest.raises(BessemerError, match="logits .*Qwen3ForCausalLM"):
            export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BessemerError, match="'some text'"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [("some text", [1, 2])])
    names = {part.name: part.gather() for part in hub_tensors(model)}
    swapped = {**names, "model.layers.0.mlp.gate_proj.weight": names["model.layers.0.mlp.up_proj.weight"]}
    monkeypatch.setattr(exporting, "write_weights", lambda model, folder, **_: _write(swapped, folder))
    with pytest.raises(BessemerError, match=r"tensor model\.layers\.0\.mlp\.gate_proj\.weight"):
        export(model, ExportFiles(path, made.end_of_text), tmp_path / "export", sample, [])
    assert list(tmp_path.iterdir()) == []


def _write(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: weight.detach().clone() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


SHARD = 30_000


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gpt2", "bert", "modernbert"])
def test_a_streamed_export_equals_the_whole_one(family: str, tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    path, made = tokenizer
    wanted = config(vocabulary=300, **FAMILIES[family].options, **({} if family == "qwen3" else {"kv_heads": 4, "head_dim": 8}))  # fmt: skip
    model = stirred(wanted)
    (tmp_path / "whole").mkdir()
    exporting.write_weights(model, tmp_path / "whole")
    checkpoint = save(tmp_path, 1, {"model": dict(model.named_parameters())}, {}, keep=1)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    with checkpoint.open_files() as files:

        def read(name: str) -> torch.Tensor:
            nonlocal most
            found = files.read("model", name)
            alive.add(found)
            most = max(most, len(alive))
            return found

        count = stream(
            meta_model(wanted), read, ExportFiles(path, made.end_of_text), tmp_path / "export", shard_bytes=SHARD
        )
    there, whole = tensors_of(tmp_path / "export"), tensors_of(tmp_path / "whole")
    assert there.keys() == whole.keys() and count == len(there)
    assert all(torch.equal(there[name], whole[name]) and there[name].dtype == whole[name].dtype for name in whole)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    by_file: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "export" / file, framework="pt") as written:
            assert name in written.keys()  # noqa: SIM118
        by_file[file] = by_file.get(file, 0) + whole[name].nbytes
    assert len(by_file) > 2 and sorted(by_file)[0] == f"model-00001-of-{len(by_file):05d}.safetensors"
    largest = max(tensor.nbytes for tensor in whole.values())
    assert all(size <= max(SHARD, largest) for size in by_file.values())
    assert most <= 5  # parameters of the checkpoint at a time, of about 20 to 40
    assert "not compared" in json.loads((tmp_path / "export" / "bessemer.json").read_text())["logits"]


def test_a_small_export_is_one_file_and_differences_are_errors(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    path, made = tokenizer
    model = stirred(config(vocabulary=300))
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stream(meta_model(model.config), named.__getitem__, ExportFiles(path, made.end_of_text), tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    reads: dict[str, int] = {}

    def drifting(name: str) -> torch.Tensor:
        reads[name] = reads.get(name, 0) + 1
        return named[name] + (name == "blocks.1.mlp.down.weight" and reads[name] > 1)

    with pytest.raises(BessemerError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        stream(meta_model(model.config), drifting, ExportFiles(path, made.end_of_text), tmp_path / "export")
    with pytest.raises(BessemerError, match=r"tensor norm\.weight .*\[3\].*\[32\]"):
        stream(meta_model(model.config), lambda name: torch.ones(3) if name == "norm.weight" else named[name], ExportFiles(path, made.end_of_text), tmp_path / "export")  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
