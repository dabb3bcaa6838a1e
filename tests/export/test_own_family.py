"""The family of docs/how-to/own-model-family.md: compared with `transformers`, trained, exported, imported; and faulty families."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli import run_command
from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError
from bessemer.export.hugging_face import ExportFiles, try_export
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.families import BY_TYPE, family_named
from bessemer.model.huggingface.weights import read_model, write_weights
from bessemer.recipe.resolved import load_resolved
from bessemer.run.files import write_json
from tests.conftest import recipe_text, write_text
from tests.model.float64 import Float64
from tests.model.parity import TOLERANCE, worst_errors
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
PAGE = (Path(__file__).parents[2] / "docs" / "how-to/own-model-family.md").read_text(encoding="utf-8")
[CODE] = re.findall(r"```python\n# starcoder\.py\n(.*?)```", PAGE, re.DOTALL)
TABLE = '[model]\nfamily = "starcoder:Starcoder2"\n'


def own(folder: Path, code: str = CODE) -> Any:
    """The family defined in a file."""
    (folder / "starcoder.py").write_text(code)
    name = f"{folder / 'starcoder.py'}:Starcoder2"
    extensions.trust([name])
    return family_named(name)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(
    "changes",
    [{"kv_heads": 1}, {"window": 7, "layers": 3, "tie_embeddings": False}, {"labels": 5}, {"kv_heads": 4, **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False)}],
)  # fmt: skip
def test_the_family_equals_transformers(changes: dict[str, Any], precision: str, tmp_path: Path) -> None:
    family = own(tmp_path)
    sizes = {"vocabulary": 101, "width": 56, "head_dim": 14, "mlp_width": 37}
    wanted = config(**{**family.options, **sizes, **changes, "family": family.name})
    ours = stirred(wanted)
    write_weights(ours, tmp_path)
    write_json(tmp_path / "config.json", to_hugging_face(wanted, 0))
    read = read_model(tmp_path)
    assert read.config == wanted.with_changes(max_positions=24) and read.config.family == family.name
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in read.state_dict().items())
    load = getattr(transformers, to_hugging_face(wanted, 0)["architectures"][0]).from_pretrained
    if precision == "fp32":
        errors = worst_errors(ours, load(tmp_path, dtype=torch.float32).eval())
    else:
        with Float64():
            errors = worst_errors(ours.double(), load(tmp_path, dtype=torch.float64).double().eval())
    assert all(error <= TOLERANCE[precision] for error in errors.values()), errors


def recipe(folder: Path, table: str, name: str = "small") -> Path:
    """Return the small recipe with another [model]."""
    text = recipe_text(folder).replace('name = "small"', f'name = "{name}"')
    begin, end = text.index("[model]"), text.index("[train]\n")
    (folder / f"{name}.toml").write_text(text[:begin] + table + text[end:])
    return folder / f"{name}.toml"


def distrust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget trust, like another process that has loaded no code."""
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    extensions._load.cache_clear()
    BY_TYPE.pop("starcoder2", None)


def run(command: str, *arguments: object) -> int:
    return run_command([command, *map(str, arguments)])


def test_a_family_is_trained_exported_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "starcoder.py").write_text(CODE)
    sets = ("--set", "train.schedule.kind=constant", "--set", "train.steps=3")
    small = recipe(tmp_path, f"{TABLE}depth = 2\nwidth = 36\nheads = 3\nkv_heads = 1\nmlp_width = 50\n\n")
    assert run("run", small, *sets) == 0, capsys.readouterr().err
    folder = tmp_path / "runs" / "small"
    config = json.loads((folder / "export" / "config.json").read_text())
    assert (config["model_type"], config["norm_epsilon"], config["use_bias"]) == ("starcoder2", 1e-5, True)
    assert load_resolved(folder / "recipe.toml").model.code is not None

    # A run resumes only with the same code.
    longer = (*sets[:3], "train.steps=5")
    (tmp_path / "starcoder.py").write_text(CODE + "\n")
    assert run("train", small, *longer) == 2
    assert "model.code" in capsys.readouterr().err
    (tmp_path / "starcoder.py").write_text(CODE)
    assert run("run", small, *longer) == 0, capsys.readouterr().err

    # Code that a run names runs with --trust-code; evaluation needs none.
    distrust(monkeypatch)
    assert run("export", folder, tmp_path / "again") == 2
    assert "--trust-code" in capsys.readouterr().err
    assert run("export", folder, tmp_path / "again", "--trust-code") == 0, capsys.readouterr().err
    distrust(monkeypatch)
    (tmp_path / "starcoder.py").rename(tmp_path / "away.py")
    assert run("evaluate", folder, "--step", 3) == 0, capsys.readouterr().err
    assert run("generate", folder, "It is", "--max-tokens", 3) == 0, capsys.readouterr().err
    assert run("report", folder) == 0
    (tmp_path / "away.py").rename(tmp_path / "starcoder.py")

    # Published weights, by the recipe and by an installed package.
    distrust(monkeypatch)
    more = recipe(tmp_path, f'{TABLE}from = "hf:{folder / "export"}"\n\n', "more")
    text = more.read_text().replace("vocabulary = 400", f'path = "{folder}/export/tokenizer.json"')
    more.write_text(text)
    assert run("run", more, "--set", "train.steps=1") == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "runs" / "more" / "export" / "config.json").read_text()) == config
    installed = tmp_path / "installed"
    info = installed / "coders-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coders\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[bessemer.model_families]\nstarcoder2 = coders:Starcoder2\n")
    shutil.copy(tmp_path / "starcoder.py", installed / "coders.py")
    monkeypatch.syspath_prepend(str(installed))
    distrust(monkeypatch)
    arguments = (folder / "export", "--name", "again", "--dir", tmp_path / "runs")
    assert run("import", *arguments) == 0, capsys.readouterr().err
    imported = load_resolved(tmp_path / "runs" / "again" / "recipe.toml").model
    assert (imported.family, imported.code) == ("starcoder2", "coders 1.2")


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ('like = "llama"', 'like = "lama"', "like: 'lama' "),
        ('"norm": "layer"', '"norms": "layer"', "options: 'norms' "),
        ('"norm": "layer"', '"norm": "batch"', "options: norm = 'batch'"),
        ('"mlp.up": ', '"mlp.upp": ', "layer_tensors: 'mlp.upp' "),
        ("[\"same_window\", 0]", '"some_window"', "rules: "),
        ("[\"same_window\", 0]", "__import__('bessemer').ConfigRule(read=lambda settings: {})", "rules: "),
        ('model_type = "starcoder2"', 'model_type = "qwen2"', "model_type: "),
        ('    architecture = "Starcoder2ForCausalLM"\n', "", "architecture: "),
        ("defaults = ", "default: dict = ", "default: "),
        ("keys = {", "keys = 3, {", "keys: "),
    ],
)  # fmt: skip
def test_an_invalid_family_class_is_one_error(
    old: str, new: str, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in CODE
    (tmp_path / "starcoder.py").write_text(CODE.replace(old, new))
    assert run("plan", recipe(tmp_path, f"{TABLE}depth = 2\n\n")) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert f"{tmp_path}/starcoder.py: Starcoder2.{fact}" in said


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ('"Starcoder2ForCausalLM"', '"Starcoder3ForCausalLM"', "architecture"),
        ('model_type = "starcoder2"', 'model_type = "starcoder"', "model_type"),
        ('"norm_epsilon"', '"norm_eps"', "keys"),
        ('"residual_dropout": "hidden", ', "", "keys"),
        ('defaults = {"kv_heads": 2}', 'defaults = {"kv_heads": 4}', "defaults"),
        ('"mlp.c_fc"', '"mlp.fc"', "layer_tensors"),
        ('"mlp.down"', '"attention.q_norm"', "layer_tensors"),
        ('"gelu_tanh",\n', '"gelu_tanh", "query_scalar": 3,\n', "options"),
        ("[\"same_window\", 0]", "__import__('bessemer').ConfigRule(write=lambda config: 1 / 0)", "rules"),
    ],
)  # fmt: skip
def test_a_family_that_computes_another_model_is_detected_before_training(
    old: str, new: str, fact: str, tmp_path: Path, runs: Path
) -> None:
    assert old in CODE
    family = own(tmp_path, CODE.replace(old, new))
    wanted = config(**{**family.options, "vocabulary": 400, "family": family.name, "width": 64})
    tokenizer = runs / "small" / "tokens" / "tokenizer.json"
    with pytest.raises(BessemerError) as error:
        try_export(wanted, ExportFiles(tokenizer, 0), tmp_path)
    assert re.search(rf"{tmp_path}/starcoder\.py.*Starcoder2\.{fact}", str(error.value)), error.value
    assert isinstance(error.value, InputError) or fact in ("layer_tensors", "options", "rules")
