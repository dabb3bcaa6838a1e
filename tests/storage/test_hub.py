"""Models of the hub by name, with a local stand-in: read, pinned, cached, and clear in errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bessemer.export.hugging_face import ExportFiles, export
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import load
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.patterns import NORMALIZERS, pattern_of
from tests.cli.commands import bessemer
from tests.model.samples import config, stirred
from tests.model_hub import COMMIT, Hub, model_hub

pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")
SCRIPT = """
import json, sys
from bessemer.storage import hub
from bessemer.common.errors import InputError
hub.SECONDS = 2.0
for text in sys.argv[1:]:
    name, _, weights = text.partition("!")
    try:
        folder = hub.fetch_model(name, weights != "settings")
        print(json.dumps([hub.pinned(name, folder), sorted(path.name for path in folder.iterdir())]))
    except InputError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """someone/small, a Qwen2 with other files of a repository; someone/pickled, with only a pickle; and a tokenizer alone."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = Tokenizer.train(
        [Path(__file__).read_text()], 300, "<|endoftext|>", regex=pattern_of("qwen2"), normalizer=NORMALIZERS["qwen2"]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    model = stirred(config(**{**FAMILIES["qwen2"].options, "vocabulary": 300}))
    sample = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    (folder / "someone" / "pickled").mkdir(parents=True)
    beside = ExportFiles(folder / "tokenizer.json", tokenizer.end_of_text)
    export(model, beside, folder / "someone" / "small", sample, [])
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/model.safetensors"):
        (folder / "someone" / "small" / name).parent.mkdir(exist_ok=True)
        (folder / "someone" / "small" / name).write_text("not to be downloaded")
    (folder / "someone" / "tokenizer").mkdir()
    (folder / "someone" / "tokenizer" / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "someone" / "pickled" / "config.json").write_text("{}")
    (folder / "someone" / "pickled" / "pytorch_model.bin").write_text("x")
    return folder


@pytest.fixture
def hub(models: Path) -> object:
    with model_hub(models) as server:
        yield server


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
    return {**os.environ, **settings, **more}


def fetched(environment: dict[str, str], *names: str) -> list[object]:
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_models_are_found_by_name_pinned_and_cached(hub: Hub, tmp_path: Path) -> None:
    here = environment(hub, tmp_path)
    names = "someone/small!settings someone/small someone/small@v1 someone/small@v9 no/body someone/pickled"
    first, settings, tagged, no_revision, nobody, pickled = fetched(here, *names.split())
    pinned = f"someone/small@{COMMIT}"
    assert first[0] == settings[0] == tagged[0] == pinned  # type: ignore[index]
    assert "model.safetensors" not in first[1] and "config.json" in first[1]  # type: ignore[index]
    assert "model.safetensors" in settings[1]  # type: ignore[index]
    assert not [path for path in hub.requested if path.endswith((".bin", ".pt", ".py", "consolidated.safetensors", "onnx/model.safetensors"))]  # fmt: skip
    assert no_revision == "hf:someone/small@v9: the model has no revision 'v9'; give a branch, a tag or a commit"
    assert nobody == "hf:no/body: no such folder, and the hub has no model of this name; a private one needs HF_TOKEN"
    assert str(pickled).startswith("hf:someone/pickled: has no model.safetensors")
    # Without a network the cached files are used, and after a moment also if the server never answers.
    offline = fetched({**here, "HF_HUB_OFFLINE": "1"}, "someone/small", pinned, "someone/other")
    assert offline[0] == offline[1] == settings
    assert str(offline[2]).startswith(
        "hf:someone/other: no such folder, and the hub cannot be asked for a model of this name"
    )
    hub.silent.set()
    silent = fetched(here, pinned, "someone/other")
    assert silent[0] == settings and "the hub cannot be asked" in str(silent[1])


def test_a_model_of_the_hub_can_be_imported(hub: Hub, tmp_path: Path) -> None:
    here = environment(hub, tmp_path / "home")
    done = bessemer("import", "hf:someone/small", "--dir", tmp_path / "runs", "--json", environment=here)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run"] == str(tmp_path / "runs" / "small") and found["commit"] == COMMIT
    kept = json.loads((tmp_path / "runs" / "small" / "environment.json").read_text())
    assert kept["imported"]["commit"] == COMMIT


def test_a_recipe_keeps_a_hub_name_unless_a_folder_has_it(tmp_path: Path) -> None:
    text = '[run]\nname = "x"\n[tokenizer]\npath = "hf:someone/small"\n[model]\nfrom = "hf:someone/small@v1"\n'
    (tmp_path / "my.toml").write_text(text)
    recipe = load(str(tmp_path / "my.toml"))
    assert (recipe.model.from_, recipe.tokenizer.path) == ("hf:someone/small@v1", "hf:someone/small")
    (tmp_path / "someone" / "small").mkdir(parents=True)
    assert load(str(tmp_path / "my.toml")).tokenizer.path == f"hf:{tmp_path / 'someone' / 'small'}"


def test_training_pins_the_commit(hub: Hub, tmp_path: Path) -> None:
    code = (
        "from bessemer.recipe import parse; from bessemer.model import recipe_defaults as derived_keys\n"
        'text = \'[run]\\nname="x"\\n[tokens]\\nsequence_length=24\\n[model]\\nfrom="hf:someone/small"\\n\'\n'
        "from bessemer.tokens.tokenizer.choice import resolve_tokenizer\n"
        "resolved = derived_keys.resolve(resolve_tokenizer(parse(text, 'x')), 300)\n"
        "print(resolved.model.from_, resolved.model.family, resolved.tokenizer.path)\n"
        'one = \'[run]\\nname="x"\\n[tokenizer]\\npath="hf:someone/%s"\\n\'\n'
        "print(*(resolve_tokenizer(parse(one % name, 'x')).tokenizer.path for name in ('small@v1', 'tokenizer')))"
    )
    command, here = [sys.executable, "-c", code], environment(hub, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here, timeout=300)
    pinned = f"hf:someone/small@{COMMIT}"
    assert done.stdout.split() == [pinned, "qwen2", pinned, pinned, f"hf:someone/tokenizer@{COMMIT}"], done.stderr
