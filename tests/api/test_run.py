"""A run from Python: its values equal those of transformers on the exported model and those the training logged."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import bessemer as bs
from bessemer.common.errors import InputError
from bessemer.tokens.shards import TokenStore

transformers = pytest.importorskip("transformers")
TEXT = "The time is now. They have been there, and straße."


@pytest.fixture(scope="module")
def exported(still_run: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(still_run / "export", dtype=torch.float32).eval()


def nats_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(inputs).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def test_the_loss_of_a_text_equals_that_of_transformers(still_run: Path, exported: torch.nn.Module) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(still_run / "export")(TEXT, return_tensors="pt").input_ids
    expected = nats_of(exported, ids[:, :-1], ids[:, 1:])
    found = bs.open_run(still_run).loss(TEXT, per_token=True)
    assert [one.id for one in found.tokens] == ids[0, 1:].tolist() and found.num_tokens == len(expected)
    assert [one.nats for one in found.tokens] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found.nats == pytest.approx(float(expected.sum()), abs=1e-4)
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / len(TEXT.encode()))
    assert bs.open_run(still_run).loss(TEXT).tokens == ()


def test_a_long_text_is_scored_in_windows(still_run: Path, exported: torch.nn.Module) -> None:
    run, text = bs.open_run(still_run), TEXT * 8
    ids = transformers.AutoTokenizer.from_pretrained(still_run / "export")(text, return_tensors="pt").input_ids
    length = run.recipe.tokens.sequence_length
    parts = [ids[:, start : start + length + 1] for start in range(0, ids.shape[1] - 1, length)]
    assert len(parts) > 3
    expected = torch.cat([nats_of(exported, part[:, :-1], part[:, 1:]) for part in parts])
    assert run.loss(text).nats == pytest.approx(float(expected.sum()), abs=1e-3)


def test_the_batch_of_a_step_equals_the_one_trained_on(still_run: Path, exported: torch.nn.Module) -> None:
    run = bs.open_run(still_run)
    table = run.metrics().to_pydict()
    assert table["step"] == list(range(1, 25))
    store = TokenStore.open(still_run / "tokens")
    ids = {one.identity: one.ids for one in store.documents()}
    for step in (1, 7, 24):
        batch = run.batch(step)
        assert batch.inputs.shape == batch.targets.shape == (8, 32)
        nats = nats_of(exported, torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))
        assert float(nats.mean()) == pytest.approx(table["loss"][step - 1], abs=1e-4)
        for row, names, offsets in zip(batch.inputs, batch.documents, batch.offsets, strict=True):
            for name, start in list(zip(names, offsets, strict=True))[1:]:
                length = min(len(row) - start, len(ids[name]))
                assert np.array_equal(row[start : start + length], ids[name][:length])
    with pytest.raises(InputError, match="25"):
        run.batch(25)


def test_metrics_have_a_row_for_each_step(still_run: Path) -> None:
    run = bs.open_run(still_run)
    lines = [json.loads(line) for line in (still_run / "metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "validation"):
        rows = [line for line in lines if line.get("kind") == kind]
        frame = run.metrics(kind).to_pandas()
        assert frame["step"].tolist() == [row["step"] for row in rows]
        assert frame["loss"].tolist() == [row["loss"] for row in rows]
        assert frame["loss_by_source.prose"].tolist() == [row["loss_by_source"]["prose"] for row in rows]
    assert len(run.metrics("tasks")) == len(run.incidents()) == 0
    with pytest.raises(InputError, match="validation"):
        run.metrics("valid")


def test_generate_equals_the_command(still_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bessemer.cli import run_command

    run = bs.open_run(still_run)
    assert run.steps[-1] == 24
    for step in (None, run.steps[0]):
        text = run.generate("The ", max_tokens=12, temperature=0.7, seed=3, step=step)
        options = ["--max-tokens", "12", "--temperature", "0.7", "--seed", "3", "--json"]
        capsys.readouterr()
        where = [] if step is None else ["--step", str(step)]
        assert run_command(["generate", str(still_run), "The ", *options, *where]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == text


def test_invalid_requests_raise_errors(still_run: Path, tmp_path: Path) -> None:
    run = bs.open_run(str(still_run))
    for ask in (
        lambda: bs.open_run(tmp_path),
        lambda: run.loss(""),
        lambda: run.generate("a", step=5),
        lambda: run.generate("a", max_tokens=0),
        lambda: run.generate("a", temperature=-1),
        lambda: run.batch(0),
    ):
        with pytest.raises(InputError):
            ask()
    shutil.copytree(still_run, tmp_path / "edited")
    recipe = tmp_path / "edited" / "recipe.toml"
    recipe.write_text(re.sub("seed = 3", "seed = 4", recipe.read_text(), count=1))
    with pytest.raises(InputError, match="recipe"):
        bs.open_run(tmp_path / "edited").loss("a")


def test_a_run_has_a_readable_repr(still_run: Path) -> None:
    run = bs.open_run(still_run)
    assert str(still_run) in run._repr_html_() and "24" in run._repr_html_()
    assert run.report().exists() and run.evaluation["step"] == 24 and (run.files.export / "config.json").exists()
