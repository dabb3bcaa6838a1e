"""Shipped recipes run from text to export in their smallest form, with their own sources, rules, objective and start."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.recipe import shipped
from bessemer.run.files import read_json
from tests.conftest import WORDS, write_conversations, write_text
from tests.corpus.language_samples import DECLARATION

SMALL = (
    "tokenizer.vocabulary=600", "tokens.sequence_length=128", "tokens.held_out=0.1", "train.steps=8", "train.global_batch_tokens=1024",
    "train.device=cpu",
)  # fmt: skip
WIDTH = ("model.width=64", "model.heads=2", "model.mlp_width=96")


def write_web(folder: Path, count: int = 300) -> None:
    """Write documents of one sentence each, without repeated words, in several languages."""
    draw, rows = random.Random(0), []
    for number in range(count):
        text = DECLARATION[("en", "de", "fr", "es", "it")[number % 5]]
        sentences = [" ".join(draw.sample(text.split(), 12)) + f" {number}." for _ in range(6)]
        rows.append(json.dumps({"text": text + "\n" + " ".join(sentences)}) + "\n")
    folder.mkdir()
    (folder / "one.jsonl").write_text("".join(rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the recipes read."""
    folder = tmp_path_factory.mktemp("shipped")
    code, draw = write_text(folder / "repositories"), random.Random(0)
    for number in range(40):
        functions = [f"int f{number}_{one}(int a) {{\n    return a * {number * one};\n}}\n" for one in range(20)]
        (code / "code" / f"{number}.c").write_text("\n".join(functions))
        sentences = [" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(12)]
        (code / "prose" / f"{number}.md").write_text("\n".join([f"# Part {number}", *sentences]))
    write_web(folder / "web")
    write_text(folder / "text")
    write_conversations(folder / "conversations.jsonl")
    for name, text in shipped().items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def done(place: Path, name: str, *overrides: str) -> Path:
    """Run a recipe. The checklist runs first, once per objective and start, since its rows depend on them."""
    sets = [part for one in (f"run.dir={place / 'runs'}", *overrides) for part in ("--set", one)]
    for command in ("check", "run") if name in ("chat", "encoder", "fineweb-edu-124m") else ("run",):
        assert run_command([command, str(place / f"{name}.toml"), *sets]) == 0, command
    run = place / "runs" / name
    assert read_json(run / "evaluation.json")["tokens"] > 0
    return run


@pytest.mark.long
def test_code_has_separate_sources_and_continued_and_chat_start_from_its_export(place: Path) -> None:
    special = 'tokenizer.special_tokens=["<|im_start|>", "<|im_end|>"]'
    run = done(place, "code", *SMALL, "model.depth=1", "train.steps=20", special)
    kept = {one["source"]: one["documents_kept"] for one in read_json(run / "corpus" / "statistics.json")["sources"]}
    assert kept == {"python": 60, "other": 40, "prose": 40}
    for name in ("continued", "chat"):
        start = f"model.from=hf:{run / 'export'}", "tokens.sequence_length=128", "tokens.held_out=0.1"
        on = done(place, name, *start, "train.global_batch_tokens=2048", "train.max_epochs=1", "train.device=cpu")
        assert read_json(on / "export" / "config.json")["vocab_size"] == 600


@pytest.mark.long
def test_languages_become_separate_sources(place: Path) -> None:
    run = done(place, "multilingual", *SMALL, "model.depth=1")
    sources = set(read_json(run / "tokens" / "manifest.json")["sources"])
    assert {"web", "web-de", "web-fr", "web-es", "web-it"} <= sources | {"web"} and len(sources) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("characters", (*SMALL[1:], "model.layers=1", *WIDTH)), ("encoder", (*SMALL, "model.layers=2", *WIDTH)),
        ("fineweb-edu-124m", (*SMALL, "model.layers=1", *WIDTH, 'corpus.sources.paths=["web"]', "corpus.sources.format=jsonl")),
    ],
)  # fmt: skip
def test_recipes_with_one_source_run(place: Path, name: str, overrides: tuple[str, ...]) -> None:
    run = done(place, name, *overrides)
    assert (run / "export" / "config.json").exists()
