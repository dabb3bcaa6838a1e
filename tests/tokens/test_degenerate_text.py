"""The filter of degenerate text before the loss: it masks degenerate text and keeps healthy text, in every layout."""

from __future__ import annotations

import base64
import random
import shutil
import string
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.cli import run_command
from bessemer.recipe import load
from bessemer.run.files import read_json_lines
from bessemer.tokens import degenerate_text
from bessemer.tokens.degenerate_text import DegenerateTextFilter
from bessemer.tokens.loader import Batch, open_loader
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from tests.conftest import recipe_text, write_text
from tests.newest import training_result

LENGTH = 128
DRAW = random.Random(0)
NOISE = DRAW.randbytes(9000)
DEGENERATE = {
    "base64": base64.encodebytes(NOISE).decode(),
    "base64 in one line": base64.urlsafe_b64encode(NOISE).decode(),
    "hexadecimal": NOISE.hex(),
    "a hex dump": NOISE.hex(" "),
    "a C array": ", ".join(f"0x{byte:02x}" for byte in NOISE),
    "one line again and again": "the same line again and again\n" * 400,
    "zeros": "0" * 9000,
    "a ruler": "-" * 30_000,
    "empty lines": "\n  \n" * 4000,
    "binary data": NOISE.decode("utf-8", "replace"),
}


def lines(count: int, make: Callable[[int], str]) -> str:
    return "\n".join(map(make, range(count)))


HEALTHY = {
    "a table": lines(900, lambda n: f"{DRAW.randint(0, 999)},{DRAW.random():.4f},{DRAW.choice('abc')}"),
    "numbers": " ".join(str(DRAW.randint(0, 10**6)) for _ in range(2000)),
    "names": lines(900, lambda n: f"{DRAW.choice(['Anna', 'Bert', 'Carl'])} {DRAW.choice(['Meier', 'Kopp'])} {n}"),
    "addresses": lines(900, lambda n: f"https://example.org/{''.join(DRAW.choices(string.ascii_letters, k=9))}"),
    "hashes of files": lines(200, lambda n: f"{DRAW.getrandbits(256):064x}  file{n}.txt"),
    "a minified script": "".join(f"function {DRAW.choice('abcde')}{n}(t){{return t.push({n})}};" for n in range(500)),
    "Chinese": "".join(chr(0x4E00 + int(DRAW.random() ** 3 * 3000)) for _ in range(4000)),
    "JSON": lines(600, lambda n: f'{{"id": {n}, "name": "x{DRAW.randint(0, 999)}", "score": {DRAW.random():.3f}}}'),
}


@pytest.fixture(scope="module")
def library() -> list[str]:
    """Return code of the standard library."""
    return [
        path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]
    ]


@pytest.fixture(scope="module")
def tokenizer(library: list[str]) -> Tokenizer:
    return Tokenizer.train(library[:20], 1024, "<|endoftext|>")


def judged(tokenizer: Tokenizer, text: str) -> tuple[int, Batch]:
    ids = np.array(tokenizer.encode(text))
    count = (len(ids) - 1) // LENGTH
    rows = np.stack([ids[number * LENGTH : (number + 1) * LENGTH + 1] for number in range(count)])
    gate = DegenerateTextFilter(tokenizer.token_byte_values(), tokenizer.end_of_text)
    return count, gate.apply(Batch.next_token(0, rows, np.zeros(count, dtype=np.int64)))


@pytest.mark.parametrize("kind", [*DEGENERATE, *HEALTHY])
def test_degenerate_text_is_masked_and_unusual_healthy_text_is_not(tokenizer: Tokenizer, kind: str) -> None:
    is_bad = kind in DEGENERATE
    count, batch = judged(tokenizer, {**DEGENERATE, **HEALTHY}[kind])
    assert len(batch.ignored) == count * is_bad and count > 0
    assert ((batch.targets == -1) == is_bad).all()
    assert {segment.tokens for segment in batch.ignored} <= {LENGTH}


def test_code_is_not_masked(tokenizer: Tokenizer, library: list[str]) -> None:
    found = [judged(tokenizer, text) for text in library if len(text) > 2000]
    assert sum(count for count, _ in found) > 1000
    assert sum(len(batch.ignored) for _, batch in found) <= 4, "rulers and empty tables"


def test_only_the_degenerate_document_of_a_sequence_is_left_out(tokenizer: Tokenizer, library: list[str]) -> None:
    end = tokenizer.end_of_text
    code, blob = tokenizer.encode(library[0]), tokenizer.encode(DEGENERATE["base64"])
    gate, source = DegenerateTextFilter(tokenizer.token_byte_values(), end), np.zeros(1, dtype=np.int64)
    row, short = (np.array([[*code[:100], end, *blob[:size], end, *code[100 : 255 - size]]]) for size in (100, 62))
    batch = gate.apply(Batch.next_token(0, row, source))
    ignored = np.flatnonzero(batch.targets[0] < 0)
    assert ignored.tolist() == list(range(100, 201)), "the blob and its end of text, as targets"
    (segment,) = batch.ignored
    assert (segment.row, segment.segment, segment.tokens, segment.reason) == (0, 1, 101, "base64")
    assert (batch.inputs == row[:, :-1]).all()
    passed = gate.apply(Batch.next_token(0, short, source))
    assert passed.ignored == (), f"less than {degenerate_text.MIN_TOKENS} tokens"


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for a text with some degenerate documents, and its tokens."""
    folder = tmp_path_factory.mktemp("sick")
    write_text(folder / "text")
    for number in range(8):
        data = random.Random(number).randbytes(600)
        (folder / "text" / "prose" / f"blob-{number}.txt").write_text(base64.encodebytes(data).decode())
    text = recipe_text(folder).replace("sequence_length = 32", "sequence_length = 128").replace("= 256", "= 1024")
    (folder / "small.toml").write_text(text.replace("[tokens]", "[tokens]\ngate = true"))
    for stage in ("corpus", "tokens"):
        assert run_command([stage, str(folder / "small.toml")]) == 0
    return folder


def trained(sick: Path, tmp_path: Path) -> Path:
    if not (tmp_path / "runs").exists():
        shutil.copytree(sick / "runs", tmp_path / "runs")
    sets = (f"run.dir={tmp_path / 'runs'}", "train.log_every=1", "checkpoint.every=12", "report.tensorboard=false")
    assert run_command(["train", str(sick / "small.toml"), *(part for one in sets for part in ("--set", one))]) == 0
    return tmp_path / "runs" / "small"


def records(run: Path) -> set[tuple[Any, ...]]:
    rows = [row for path in run.glob("gated*.jsonl") for row in read_json_lines(path)]
    return {(row["step"], row["sample"], row["document"], row["tokens"], row["reason"]) for row in rows}


def test_a_run_masks_and_reports_degenerate_documents_and_resumes_exactly(
    sick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(sick, tmp_path)
    said = capsys.readouterr().err
    assert "did not count (" in said and "base64; gated.jsonl)" in said
    steps = [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]
    assert sum(row["gated_targets"] for row in steps) == sum(row[3] for row in records(run)) > 500
    blobs = {row["document"] for row in read_json_lines(run / "gated.jsonl")}
    assert 1 <= len(blobs) <= 8
    store = TokenStore.open(run / "tokens")
    sample = read_json_lines(run / "gated.jsonl")[0]
    inner = open_loader(load(run / "recipe.toml"), store)
    assert sample["document"] in inner.documents(sample["sample"], 1)[0]["documents"]  # type: ignore[operator]
    whole, before = training_result(run), records(run)
    shutil.rmtree(run / "checkpoints" / "step-00000024")
    assert training_result(trained(sick, tmp_path)) == whole
    assert records(run) == before


def test_every_rank_masks_the_same_text(tokenizer: Tokenizer) -> None:
    texts = [*HEALTHY.values(), *DEGENERATE.values()]
    rows = np.array([tokenizer.encode(text)[: LENGTH + 1] for text in texts])
    batch = Batch.next_token(0, rows, np.zeros(len(rows), dtype=np.int64))
    gate = DegenerateTextFilter(tokenizer.token_byte_values(), tokenizer.end_of_text)
    whole, parts = gate.apply(batch), [gate.apply(batch.part(rank, 2)) for rank in range(2)]
    assert len(whole.ignored) == sum(len(part.ignored) for part in parts) > 0
    assert all(np.array_equal(part.targets, whole.targets[rank::2]) for rank, part in enumerate(parts))


def test_the_filter_needs_text_to_predict(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--set", "train.objective=masked", "--set", "model.family=bert", "--set", "tokens.document_mask=true")
    assert run_command(["train", str(sick / "small.toml"), *sets]) == 2
    assert "tokens.gate judges the text that is predicted; train.objective = masked has none" in capsys.readouterr().err
