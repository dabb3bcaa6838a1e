"""Every command of a tutorial runs in a folder with only the files the page asks for, on small copies of the examples' recipes."""

import json
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.recipe import load
from tests.conftest import WORDS, write_conversations, write_text
from tests.corpus.corpus_samples import http, warc_record
from tests.corpus.slurm_commands import install

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PLANNED = ("7b-512xh100", "moe-30b-a3b", "encoder")
"""Examples whose plan needs neither text nor another model."""

SMALL_STEPS = ("width = 256", "width = 32"), ("mlp_width = 512", "mlp_width = 64"), ("layers = 3", "layers = 2")
SMALL = {
    "speedrun-cpu": (
        *SMALL_STEPS, ("max_bytes = 12_000_000", "max_bytes = 400_000"), ("max_bytes = 3_000_000", "max_bytes = 100_000"),
        ("vocabulary = 2048", "vocabulary = 400"), ("steps = 600", "steps = 4"), ("held_out = 0.03", "held_out = 0.2"),
        ("sequence_length = 256", "sequence_length = 32"), ("global_batch_tokens = 4096", "global_batch_tokens = 256"),
    ),
    "own-text": (("minutes = 10", "minutes = 0.02"),),
    "llama-3.2-1b-domain": (
        ("tokens = 500_000_000", "tokens = 2_048"), ("global_batch_tokens = 262_144", "global_batch_tokens = 256"),
        ("sequence_length = 4096", "sequence_length = 64"), ("held_out = 0.01", "held_out = 0.2"),
        ('"H100"', '"RTX 4090"'), ("every = 100", "every = 4"),
    ),
    "chat": (
        ("sequence_length = 1024", "sequence_length = 128"), 
        ("held_out = 0.02", "held_out = 0.1"), ("max_epochs = 3", "max_epochs = 1"),
    ),
    "commoncrawl-slurm": (
        ("workers = 200", "workers = 2"), ("vocabulary = 32_768", "vocabulary = 400"), ("depth = 12", "depth = 2"),
        ("sequence_length = 2048", "sequence_length = 64"), ("held_out = 0.002", "held_out = 0.1"),
    ),
}  # fmt: skip
"""Replacements in the examples that the tutorials run. Keys stay the same."""

SHORTENED = {
    "first-run": (
        (
            "bessemer demo",
            "bessemer demo --set train.minutes=0.02 --set corpus.sources.code.max_bytes=400000"
            " --set corpus.sources.docs.max_bytes=100000 --set tokens.held_out=0.2 --set tokens.sequence_length=64",
        ),
    ),
    "your-own-text": (("train.minutes=20", "train.minutes=0.03"),),
    "common-crawl": (("https://data.commoncrawl.org", "file://$PWD/commoncrawl"),),
    "cluster": (("--out job", "--out job --set train.global_batch_tokens=16384"),),  # so that 16 ranks divide it
}
"""Replacements in the commands of a page."""


def keys(table: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a recipe."""
    for name, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield f"{prefix}{name}"
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from keys(value, f"{prefix}{name}.")


def write_examples(folder: Path) -> None:
    """Write small copies of the examples, with the same keys."""
    folder.mkdir()
    for path in EXAMPLES:
        whole = small = path.read_text(encoding="utf-8")
        for old, new in SMALL.get(path.stem, ()):
            assert old in small, f"{path.name}: {old}"
            small = small.replace(old, new)
        assert list(keys(tomllib.loads(small))) == list(keys(tomllib.loads(whole))), path.name
        (folder / path.name).write_text(small)


def write_lines(path: Path, documents: int, seed: int) -> None:
    """Write documents of random words as JSON lines."""
    draw = random.Random(seed)
    path.parent.mkdir()
    rows = [{"text": "\n".join(" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(12))} for _ in range(documents)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, **sizes: Any) -> None:
    """Write a tiny Llama with its tokenizer where a hub model would be. `sizes` writes only the configuration."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = ByteLevelBPETokenizer()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, vocab_size=400, special_tokens=special, show_progress=False)
    if sizes:
        LlamaConfig(bos_token_id=0, eos_token_id=1, **sizes).save_pretrained(folder)
    else:
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def first_run(folder: Path) -> None:
    """Prepare nothing: the text is on every machine."""


def own_text(folder: Path) -> None:
    write_text(folder / "text")


def continue_a_model(folder: Path) -> None:
    write_model(folder / "meta-llama" / "Llama-3.2-1B")
    write_lines(folder / "domain" / "a.jsonl", 60, seed=1)
    write_lines(folder / "general" / "a.jsonl", 40, seed=2)


def chat(folder: Path) -> None:
    write_model(folder / "HuggingFaceTB" / "SmolLM2-135M")
    write_conversations(folder / "conversations.jsonl")


def common_crawl(folder: Path) -> None:
    """Write a crawl of two archives as Common Crawl publishes it, and simulate Slurm's commands."""
    import gzip

    install(folder / "slurm")
    draw = random.Random(0)
    crawl = folder / "commoncrawl" / "crawl-data" / "CC-MAIN-2024-10"
    names = [f"segments/1/warc/CC-MAIN-{number}.warc.gz" for number in range(2)]
    for name in names:
        (crawl / name).parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(crawl / name, "wb") as file:
            for number in range(40):
                lines = [" ".join(draw.choices(WORDS, k=14)).capitalize() + "." for _ in range(40)]
                body = "".join(f"<p>{' '.join(lines[at : at + 4])}</p>" for at in range(0, 40, 4))
                page = f"<html><head><title>A page</title></head><body><main>{body}</main></body></html>"
                file.write(warc_record(http(page.encode()), url=f"http://a.example/{name}/{number}"))
    with gzip.open(crawl / "warc.paths.gz", "wt") as file:
        file.write("".join(f"crawl-data/CC-MAIN-2024-10/{name}\n" for name in names))


NEEDS: dict[str, Callable[[Path], None]] = {
    "first-run": first_run,
    "your-own-text": own_text,
    "continue-a-model": continue_a_model,
    "chat": chat,
    "common-crawl": common_crawl,
    "compare-mixtures": first_run,
    "cluster": own_text,
}
"""Functions that write the files each tutorial asks for."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Return kind and text of the page's executable blocks, in order."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(bash|python|toml)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_every_tutorial_runs() -> None:
    assert {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")} == set(NEEDS)


@pytest.mark.long
@pytest.mark.parametrize("page", NEEDS)
def test_every_command_of_the_tutorial_completes(page: str, tmp_path: Path) -> None:
    write_examples(tmp_path / "examples")
    NEEDS[page](tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bessemer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bessemer "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{tmp_path / 'slurm' / 'bin'}:{os.environ['PATH']}"
    for kind, text in blocks(page):
        for old, new in SHORTENED.get(page, ()):
            text = text.replace(old, new)
        if kind == "toml":
            tomllib.loads(text)
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}: {text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_recipe(path: Path) -> None:
    load(path)


@pytest.mark.parametrize("page", ["your-own-text", "continue-a-model", "chat", "common-crawl", "compare-mixtures"])
def test_the_recipe_shown_in_the_tutorial_equals_the_example(page: str) -> None:
    lines = {line for path in EXAMPLES for line in path.read_text(encoding="utf-8").splitlines()}
    changes = ("s3://", 'from = "hf:runs/own/export"\n')  # in changes of the recipe that the page suggests
    shown = [text for kind, text in blocks(page) if kind == "toml" and not any(one in text for one in changes)]
    assert shown
    for text in shown:
        assert not set(text.splitlines()) - lines


@pytest.mark.parametrize("name", PLANNED)
def test_the_example_fits_its_devices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", str(ROOT / "examples" / f"{name}.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_the_hours_of_llama_equal_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        tmp_path / "meta-llama" / "Llama-3.2-1B", vocab_size=128_256, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072,
        tie_word_embeddings=True, rope_theta=500_000.0,
    )  # fmt: skip
    recipe = tmp_path / "domain.toml"
    recipe.write_text((ROOT / "examples" / "llama-3.2-1b-domain.toml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "tutorials" / "continue-a-model.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([^|,]+), (\d+) GB \| [^|]+ \| ([\d.]+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \|$", text, re.M
    )
    assert len(rows) == 3
    for device, gigabytes, memory, *hours in rows:
        name = {"A100": "A100 SXM 80GB"}.get(device, device)
        options = [f'cluster.device="{name}"']
        options += ["train.optimizer.state=8bit", "train.loss_chunk=1024"] if gigabytes == "24" else []
        sets = [word for option in options for word in ("--set", option)]
        assert run_command(["plan", str(recipe), "--json", *sets]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["fits"] and plan["device_memory_bytes"] == int(gigabytes) * 1e9
        assert float(memory) == pytest.approx(plan["memory_bytes_per_device"]["total"] / 1e9, rel=0.01)
        assert float(hours[0]) == pytest.approx(plan["expected"]["device_hours"], rel=0.03)
