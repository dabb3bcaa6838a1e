"""Families as a user trains them: from scratch, exported, and trained further from the export."""

import json
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.recipe import load
from bessemer.tokens.tokenizer import Tokenizer
from tests.choose import long_but
from tests.conftest import recipe_text, write_text

pytest.importorskip("transformers")

# Options that make the small run cross what is special: windows, layers without rotary positions, the original length.
FAMILIES = {
    "gemma2": ("causal", "window = 8\nkv_heads = 1\n"),
    "gemma3": ("causal", "window = 8\nglobal_every = 2\nkv_heads = 1\n"),
    "phi3": (
        "causal",
        'kv_heads = 1\nrotary_fraction = 0.5\nrope_scaling = { kind = "longrope", factor = 2.0, original_length = 16, '
        "short_factor = [1.0, 1.5, 2.0, 2.5], long_factor = [1.0, 2.0, 3.0, 4.0] }\n",
    ),
    "smollm3": ("causal", "kv_heads = 1\nunrotated_every = 2\nmlp_bias = true\n"),
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
    """Every export passes the gate, which compares it with `transformers`, or the run fails."""
    objective, options = FAMILIES[family]
    text = recipe_text(place).replace('name = "small"', f'name = "{family}"')
    text = text.replace("[train]\n", f'[train]\nobjective = "{objective}"\n')
    own = text.replace("kv_heads = 1\n", f'family = "{family}"\n{options}').replace("= 400", "= 410")
    (place / f"{family}.toml").write_text(own)
    assert run_command(["run", str(place / f"{family}.toml"), "--set", "train.steps=4"]) == 0, capsys.readouterr().err
    export = place / "runs" / family / "export"
    first = json.loads((export / "config.json").read_text())
    begin, end = text.index("[model]"), text.index("[train]\n")
    further = text[:begin] + f'[model]\nfrom = "hf:{export}"\n\n' + text[end:]
    further = further.replace("vocabulary = 400", f'path = "{export}/tokenizer.json"')
    (place / "further.toml").write_text(further.replace(f'name = "{family}"', f'name = "{family}-further"'))
    assert run_command(["run", str(place / "further.toml"), "--set", "train.steps=1"]) == 0, capsys.readouterr().err
    assert json.loads((place / "runs" / f"{family}-further" / "export" / "config.json").read_text()) == first


def test_a_tokenizer_that_transformers_would_change_is_refused_before_the_corpus_is_built(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' Qwen2 cuts digits one by one and composes characters, whatever tokenizer.json says."""
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
