"""Folders of other people: no link out of them is followed, no code of theirs is asked for, and no left-over key is an error."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.export.import_model import import_model
from bessemer.model.huggingface.config import read_config, to_hugging_face
from bessemer.model.huggingface.export import ExportFiles, export, write_weights
from bessemer.model.huggingface.families import FAMILIES, READ_ANYWHERE
from bessemer.run.directory import RunDirectory
from bessemer.storage.hub import foreign_file
from bessemer.tokens.tokenizer import Tokenizer
from tests.conftest import WORDS
from tests.model.samples import config, read_checked, stirred

transformers = pytest.importorskip("transformers")
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
def test_a_link_out_of_a_folder_is_refused(
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
    # A cache whose blobs are another folder is none.
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
    assert found.logits_max_difference is not None and found.logits_max_difference < 1e-4
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
def test_keys_that_the_class_ignores_are_no_error(family: str, tmp_path: Path) -> None:
    """Keys of all other families and near names of its own, with values that would matter if they were read."""
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
    assert "not read by transformers either" in check.note


@pytest.mark.parametrize("family", list(FAMILIES))
def test_keys_that_the_class_reads_are_refused_where_they_are_not_known(family: str, tmp_path: Path) -> None:
    """What the class reads is seen while it computes, without a list."""
    for key in sorted(READ_ANYWHERE - FAMILIES[family].known):
        with pytest.raises(InputError, match=key):
            read_config(written(family, tmp_path, **{key: 3}))
    with pytest.raises(InputError, match="base_model_tp_plan = 3 is read by"):
        read_checked(written(family, tmp_path, base_model_tp_plan=3))


def test_modernbert_as_its_first_version_was_published(tmp_path: Path) -> None:
    old = {
        "layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "gradient_checkpointing": False, "reference_compile": None,
        "repad_logits_with_grad": False, "sparse_prediction": False, "transformers_version": "4.47.0.dev0", "torch_dtype": "float32",
    }  # fmt: skip
    folder = written("modernbert", tmp_path, **old)
    assert read_checked(folder)[0].config == read_config(written("modernbert", tmp_path))
