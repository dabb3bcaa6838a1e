"""Published models as a user meets them: imported, chatted with, trained on, exported again."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.export.export_run import export_trained
from bessemer.export.hugging_face import ExportFiles, export
from bessemer.export.import_model import import_model
from bessemer.model.huggingface.config import read_config, to_hugging_face
from bessemer.model.huggingface.families import FAMILIES, READ_ANYWHERE
from bessemer.model.huggingface.weights import write_weights
from bessemer.recipe import load, load_resolved
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, write_json
from bessemer.storage.hub import foreign_file
from bessemer.tokens.tokenizer import Tokenizer
from tests.cli.commands import bessemer
from tests.conftest import WORDS, recipe_text, with_model, write_text
from tests.model.samples import config, read_checked, stirred

pytest.importorskip("transformers")
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text/, and `theirs`: a GPT-2 of random weights with a tokenizer of 400 ids, one row more than the model has ids."""
    folder = tmp_path_factory.mktemp("import")
    write_text(folder / "text")
    tokenizer = Tokenizer.train([path.read_text() for path in sorted((folder / "text").rglob("*.*"))], 400, END)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    model = stirred(
        config(**{**FAMILIES["gpt2"].options, "kv_heads": 4, "head_dim": 8, "vocabulary": 401, "sequence_length": 64})
    )
    sample = torch.randint(0, 400, (1, 24), generator=torch.Generator().manual_seed(0))
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    beside = ExportFiles(folder / "tokenizer.json", tokenizer.end_of_text, dropout=dropout)
    export(model, beside, folder / "theirs", sample, [])
    return folder


@pytest.fixture(scope="module")
def imported(place: Path) -> Path:
    done = bessemer("import", place / "theirs", "--dir", place / "runs", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["architecture"] == "GPT2LMHeadModel"
    assert found["logits_max_difference"] < 1e-4
    assert found["greedy_tokens_equal"] == 32 + 3 * 32  # from ids, and from three texts
    assert Path(load(Path(found["run"]) / "recipe.toml").tokenizer.path or "").is_absolute()  # from any folder
    return Path(found["run"])


def test_evaluating_an_imported_model_without_text_is_an_error(imported: Path) -> None:
    done = bessemer("evaluate", imported)
    assert done.returncode == 2
    assert "model.from" in done.stderr
    for command in ("run", "train"):
        done = bessemer(command, imported, "--set", "train.steps=5")
        assert done.returncode == 2
        assert "[[corpus.sources]]" in done.stderr
        assert f'train.start = "{imported}"' in done.stderr


def test_a_run_starts_from_the_weights_of_a_folder(place: Path, tmp_path: Path) -> None:
    text = recipe_text(place).replace('name = "small"', 'name = "tuned"')
    text = with_model(text, 'from = "hf:theirs"')
    text = text.replace("[tokenizer]\nvocabulary = 400\n", "")  # the model's own
    (place / "tuned.toml").write_text(text)
    done = bessemer("run", place / "tuned.toml", "--set", "train.steps=6")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((place / "runs/tuned/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["facts"]["model"]["positions"] == "learned"
    assert manifest["facts"]["model"]["max_positions"] == 64
    told, given = (json.loads((place / at / "config.json").read_text()) for at in ("runs/tuned/export", "theirs"))
    assert told["n_positions"] == 64
    # Dropout is off, and the export keeps the imported value.
    pdrops = [key for key in given if key.endswith("_pdrop")]
    assert len(pdrops) == 3 and all(told[key] == given[key] == 0.1 for key in pdrops)
    # Training started from those weights: the first loss is theirs, not that of a new model (ln 400 = 6.0).
    first = next(row for row in read_json_lines(place / "runs/tuned/metrics.jsonl") if row["kind"] == "train")
    fresh = bessemer("train", place / "tuned.toml", "--set", 'run.name="tuned"', "--restart", "--set", "train.steps=1")
    assert fresh.returncode == 0, fresh.stderr
    again = next(row for row in read_json_lines(place / "runs/tuned/metrics.jsonl") if row["kind"] == "train")
    assert again["loss"] == first["loss"]
    # The recipe's values replace it.
    recipe = load_resolved(place / "runs/tuned/recipe.toml", ("train.dropout.hidden=0.2",))
    export_trained(recipe, RunDirectory(place / "runs/tuned"), tmp_path / "dropped")
    dropped = json.loads((tmp_path / "dropped/config.json").read_text())
    assert [dropped[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.2, 0.2, 0.0]
    assert abs(first["loss"] - 6.0) > 0.05
    wrong = bessemer("plan", place / "tuned.toml", "--set", "model.layers=3")
    assert wrong.returncode == 2
    assert "model.layers: 3 " in wrong.stderr


def test_mismatched_models_are_errors_and_leave_nothing(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(place / "theirs", folder)
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "vocab_size": 399})
    done = bessemer("import", folder, "--dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "tensor transformer.wte.weight" in done.stderr and "[399, 32]" in done.stderr
    write_json(folder / "config.json", settings)
    larger = Tokenizer.train([Path(__file__).read_text()], 450, END)
    (folder / "tokenizer.json").write_text(larger.to_json())
    done = bessemer("import", folder, "--dir", tmp_path / "runs")
    assert done.returncode == 2
    assert str(folder) in done.stderr and "450" in done.stderr and "401" in done.stderr
    assert not (tmp_path / "runs").exists()


transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def wordpiece(folder: Path) -> int:
    """Write a BERT tokenizer as transformers saves it, and return its ids."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz",
                  *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"), *".,0123456789"]  # fmt: skip
    vocabulary = list(dict.fromkeys(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return len(vocabulary)


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Save a model of random weights with its class of transformers."""
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
    """Rename LayerNorms as in the first BERT checkpoints, in one file."""
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
    assert found["logits_max_difference"] < 1e-4 and found["note"] == ""
    manifest = json.loads((run.tokens / "manifest.json").read_text())
    assert manifest["tokenizer"]["mask_token"] == 4 and manifest["tokenizer"]["end_of_text"] == 3
    assert manifest["labels"] == (list(settings["id2label"].values()) if "id2label" in settings else
                                  ["LABEL_0", "LABEL_1"] if "Classification" in kind else [])  # fmt: skip
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]
    with pytest.raises(InputError, match=str(run.path)):
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
def test_a_damaged_folder_is_one_error_and_leaves_nothing(
    change: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    folder = saved("BertForMaskedLM", tmp_path / "theirs")
    change(folder)
    with pytest.raises(InputError, match=file) as caught:
        import_model(folder, RunDirectory(tmp_path / "runs" / "x"), "x", str(tmp_path / "runs"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


SECRET = "what nobody but its owner may read"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("theirs")
    made = Tokenizer.train([" ".join(WORDS) * 9], 300, "</s>")
    (folder / "tokenizer.json").write_text(made.to_json())
    model = stirred(config(**{**FAMILIES["llama"].options, "vocabulary": 300, "family": "llama"}))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    export(model, ExportFiles(folder / "tokenizer.json", made.end_of_text), folder / "model", sample, [])
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model" / "additional_chat_templates").mkdir()
    (folder / "model" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder / "model"


def changed(folder: Path, **settings: Any) -> None:
    before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(before | settings))


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer_config.json", "tokenizer.json", "config.json",
     "generation_config.json", "README.md", "model.safetensors", "merges.txt"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["file", "folder above", "pipe"])
def test_a_link_out_of_a_folder_is_an_error(
    name: str, kind: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outside = tmp_path / "model", tmp_path / "private" / Path(name).name
    shutil.copytree(theirs, folder)
    outside.parent.mkdir()
    outside.write_text(SECRET)
    if (folder / name).exists():
        (folder / name).rename(outside)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        up = Path("..") / ("../" if "/" in name else "") / "private" / outside.name
        (folder / name).symlink_to(outside if kind == "file" else up)
    if kind == "pipe" and name in ("README.md", "merges.txt"):
        return  # neither read nor copied
    assert run_command(["import", str(folder), "--dir", str(tmp_path / "runs"), "--name", "x"]) == 2
    assert str(folder / name) in capsys.readouterr().err
    assert list(tmp_path.glob("runs/*")) == []
    if kind == "file" and name not in ("README.md", "merges.txt", "additional_chat_templates/tools.jinja"):
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "a.txt").write_text(" ".join(WORDS) * 20)
        (tmp_path / "my.toml").write_text(
            f'run.dir = "{tmp_path}/runs"\nrun.name = "y"\nmodel.from = "hf:{folder}"\n'
            f'[[corpus.sources]]\nname = "text"\npaths = ["text"]\n'
        )
        assert run_command(["run", str(tmp_path / "my.toml")]) == 2
        assert str(folder / name) in capsys.readouterr().err
        assert SECRET not in "".join(path.read_text() for path in tmp_path.glob("runs/y/**/*.*") if path.is_file())


def test_the_links_of_the_hubs_cache_are_followed(theirs: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(theirs.glob("*.*"))):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    import_model(snapshot, RunDirectory(tmp_path / "runs" / "x"), "x", str(tmp_path / "runs"))
    source = tmp_path / "runs" / "x" / "source"
    assert not (source / "config.json").is_symlink()
    assert (source / "chat_template.jinja").read_text() == (theirs / "chat_template.jinja").read_text()
    # A cache whose blobs folder is elsewhere is not a cache.
    blobs.rename(tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(InputError, match=r"config.json"):
        foreign_file(snapshot, "config.json")


@pytest.mark.parametrize("value", ["someone/kernel", "kernels-community/flash-attn", "flash_attention_2", {"": "a/b"}])
def test_a_config_does_not_choose_what_computes_attention(
    value: Any, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(theirs, tmp_path / "model")
    code = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M", "AutoTokenizer": ["t.T", "t.T"]}
    changed(
        tmp_path / "model", attn_implementation=value, _attn_implementation=value, _attn_implementation_internal=value,
        experts_implementation=value, auto_map=code,
    )  # fmt: skip
    (tmp_path / "model" / "modeling_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: asked.append(address))
    found = import_model(tmp_path / "model", RunDirectory(tmp_path / "runs" / "x"), "x", str(tmp_path / "runs"))
    assert found["logits_max_difference"] < 1e-4
    assert not asked and not (tmp_path / "ran").exists()
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False, "the network is there again"


EVERY_KEY: dict[str, Any] = {
    key: value for family in FAMILIES for key, value in transformers.AutoConfig.for_model(FAMILIES[family].model_type).to_dict().items()
}  # fmt: skip


def written(family: str, folder: Path, **settings: Any) -> Path:
    options = {**FAMILIES[family].options, **next(iter(FAMILIES[family].examples.values())), "family": family}
    model = stirred(config(**options))
    write_weights(model, folder)
    (folder / "config.json").write_text(json.dumps({**to_hugging_face(model.config, 0), **settings}))
    return folder


@pytest.mark.parametrize("family", list(FAMILIES))
def test_keys_that_the_class_ignores_are_allowed(family: str, tmp_path: Path) -> None:
    """Keys of all other families and misspelled keys of this one, with values that would matter if they were read."""
    known = FAMILIES[family].known
    ignored: dict[str, Any] = {
        key: 0.5 if key.endswith("_eps") else 7 for key in EVERY_KEY if key not in known | READ_ANYWHERE
    }
    ignored |= {f"{key}_": 7 for key in FAMILIES[family].keys.values()} | {"kernel_size": "someone/kernel"}
    assert len(ignored) > 20
    plain = read_config(written(family, tmp_path))
    model, check = read_checked(written(family, tmp_path, **ignored))
    assert model.config == plain
    assert check.max_difference is not None and check.max_difference < 1e-4
    assert "kernel_size" in check.note


@pytest.mark.parametrize("family", list(FAMILIES))
def test_unknown_keys_that_the_class_reads_are_errors(family: str, tmp_path: Path) -> None:
    """The keys that the class reads are observed while it computes, without a list."""
    for key in sorted(READ_ANYWHERE - FAMILIES[family].known):
        with pytest.raises(InputError, match=key):
            read_config(written(family, tmp_path, **{key: 3}))
    with pytest.raises(InputError, match="base_model_tp_plan = 3 "):
        read_checked(written(family, tmp_path, base_model_tp_plan=3))


def test_modernbert_in_its_first_published_version_is_imported(tmp_path: Path) -> None:
    old = {
        "layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "gradient_checkpointing": False, "reference_compile": None,
        "repad_logits_with_grad": False, "sparse_prediction": False, "transformers_version": "4.47.0.dev0", "torch_dtype": "float32",
    }  # fmt: skip
    folder = written("modernbert", tmp_path, **old)
    assert read_checked(folder)[0].config == read_config(written("modernbert", tmp_path))
