"""Training on packed sequences: the losses and gradients equal those of separate documents."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bessemer.distributed.context import LocalBatch
from bessemer.model.transformer import build_model
from bessemer.tokens.held_out import held_out_samples
from bessemer.tokens.loader import open_loader
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train import device as devices
from bessemer.train.mixture_audit import counts_after, mixture_audit, no_counts
from bessemer.train.task import config_of, task_of
from bessemer.train.trainer import Trainer
from bessemer.train.validation import validate
from tests.tokens.token_samples import END, VOCABULARY, documents, recipe_of, store_of

TEXTS = {"a": documents(1, 30, longest=20), "b": documents(2, 15, longest=11)}
MASK = "document_mask = true"


def trainer_of(recipe: object, micro: int = 4) -> Trainer:
    settings = recipe.train.model_copy(update={"micro_batch": micro, "device": "cpu", "precision": "fp32"})  # type: ignore[attr-defined]
    made = recipe.model_copy(update={"train": settings})  # type: ignore[attr-defined]
    model = build_model(config_of(made, VOCABULARY, 0), 1)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # the output projections start at 0, so that nothing would be mixed
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return Trainer(made, model.double(), devices.choose(settings), END, 2)


def alone(trainer: Trainer, ids: list[int]) -> float:
    """Return the nats of a separate document: end-of-text and its tokens, each of which predicts the next, the last one
    end-of-text.
    """
    inputs, targets = torch.tensor([[END, *ids]]), torch.tensor([*ids, END])
    logits = trainer.model.head.logits(trainer.model(inputs, None))[0]
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


@pytest.mark.parametrize("packing", ["best-fit", "document"])
@torch.no_grad()
def test_packed_documents_have_the_losses_of_separate_ones(tmp_path: Path, packing: str) -> None:
    """Row 28 of the reliability page: relative 1e-6 per document, with positions and attention restarted."""
    recipe = recipe_of(packing, 24, MASK)  # no document is longer
    loader, trainer = open_loader(recipe, store_of(tmp_path, recipe, TEXTS)), trainer_of(recipe)
    by_document: list[float] = []
    for split in loader.sources:
        inputs, targets, starts, real = split.rows(np.arange(len(split.pack)))
        inputs_BT, targets_BT, starts_BT = map(torch.from_numpy, (inputs, targets, starts))
        batch = LocalBatch(inputs_BT, targets_BT)
        nats_BT, _ = trainer.task.score(trainer.model, trainer.hidden(inputs_BT, starts_BT), batch)
        for row in range(len(inputs)):
            begins = [*np.flatnonzero(starts[row]).tolist(), 24]
            assert (nats_BT[row, real[row] :] == 0).all()
            by_document += [float(nats_BT[row, a:b].sum()) for a, b in itertools.pairwise(begins) if a < real[row]]
    wanted = sorted(alone(trainer, ids) for texts in TEXTS.values() for ids in texts)
    assert sorted(by_document) == pytest.approx(wanted, rel=1e-6)


def test_validation_of_packed_text_is_the_mean_over_its_documents(tmp_path: Path) -> None:
    recipe = recipe_of("best-fit", 24, MASK)
    store, trainer = store_of(tmp_path, recipe, TEXTS), trainer_of(recipe)
    found = validate(trainer, held_out_samples(recipe, store))
    tokens = sum(len(ids) for texts in TEXTS.values() for ids in texts)
    assert found.tokens == found.bytes == tokens
    with torch.no_grad():
        nats = 0.0
        for ids in (ids for texts in TEXTS.values() for ids in texts if ids):
            logits = trainer.model.head.logits(trainer.model(torch.tensor([[END, *ids]]), None))[0, :-1]
            nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum"))
    assert found.loss == pytest.approx(nats / tokens, rel=1e-6)


def test_a_packed_run_end_to_end(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line: tokens, plan, training with a phase and a stop, evaluation, report, and the ledger."""
    from bessemer.cli import run_command
    from bessemer.run.files import read_json

    text = (prepared / "small.toml").read_text().replace(str(prepared / "runs"), str(tmp_path / "runs"))
    text = text.replace("[model]", 'packing = "best-fit"\ndocument_mask = true\n[model]')
    text += "[[tokens.schedule]]\nfrom = 0.5\nweights = {prose = 1, code = 3}\n"
    path = tmp_path / "packed.toml"
    path.write_text(text)
    assert run_command(["run", str(path), "--set", "export.hf=false"]) == 0
    run = tmp_path / "runs" / "small"
    manifest, plan, mixture = (read_json(run / name) for name in ("tokens/manifest.json", "plan.json", "mixture.json"))
    assert manifest["packing"] == plan["packing"]
    assert sum(name.endswith(".pack") for name in manifest["files"]) == 4
    assert [(phase["from"], phase["to"]) for phase in mixture["phases"]] == [(0, 96), (96, 192)]
    assert mixture["follows_the_order"]
    late = mixture["phases"][1]["sources"]
    assert late["code"]["drawn_share"] == pytest.approx(0.75, abs=0.1)
    page = (run / "report.html").read_text()
    assert "Packing: best-fit" in page
    assert "The phases of the mixture" in page
    assert 0.5 < manifest["packing"]["utilisation"] <= 1.0
    capsys.readouterr()
    assert run_command(["trace", str(run), "--step", "3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[-1]
    assert run_command(["trace", str(run), "--document", row["document"], "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert (3, row["sample"]) in {(one["step"], one["sample"]) for one in steps}


def test_masked_training_on_packed_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("best-fit", 24, MASK)
    changed = recipe.train.model_copy(update={"objective": "masked"})
    model = recipe.model.model_copy(update={"family": "modernbert"})
    recipe = recipe.model_copy(update={"train": changed, "model": model})
    store = store_of(tmp_path, recipe, TEXTS)
    monkeypatch.setattr(Tokenizer, "load", lambda *_: SimpleNamespace(vocabulary=VOCABULARY))
    task = task_of(recipe.train, recipe.tokens.document_mask, config_of(recipe, VOCABULARY, 0), END)
    assert task.is_encoder
    plain, batch = open_loader(recipe, store).batch(16, 8), task.loader(recipe, store).batch(16, 8)
    hidden = batch.targets >= 0
    assert np.array_equal(batch.targets[hidden], plain.inputs[hidden])
    assert not hidden[plain.inputs == END].any()  # no padding and no end of a text
    assert np.array_equal(batch.starts, plain.starts)
    assert hidden.any(axis=1).sum() >= 7
    parts = task.held_out(recipe, store)
    assert all(part.starts is not None for part in parts)


SCHEDULE = "[[tokens.schedule]]\nfrom = 0.55\nweights = {a = 1, b = 4}\n"


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_audit_equals_a_count_of_the_batches(tmp_path: Path, packing: str) -> None:
    recipe = recipe_of(packing, more=SCHEDULE, steps=20, a="max_epochs = 3", b="")
    store = store_of(tmp_path, recipe, {"a": documents(1, 12), "b": documents(2, 40)})
    loader = open_loader(recipe, store)
    given, rows = no_counts(loader.mixture), []
    for step in range(20):
        batch = loader.batch(8 * step, 8)
        given = counts_after(given, batch, loader.mixture)
        for slot in range(8):
            rows.append((8 * step + slot >= 88, int(batch.source[slot]), int((batch.targets[slot] >= 0).sum())))
    found = mixture_audit(loader.mixture, given, 160)
    for number, name in enumerate("ab"):
        mine = [row for row in rows if row[1] == number]
        source = found["sources"][name]
        assert source["sequences"] == len(mine)
        assert source["tokens"] == sum(row[2] for row in mine)
        assert source["epochs"] == len(mine) / loader.mixture.sequences[number]
        assert source["drawn_share"] == pytest.approx(source["tokens"] / sum(row[2] for row in rows))
        for late, phase in enumerate(found["phases"]):
            here = [row for row in mine if row[0] == bool(late)]
            assert phase["sources"][name]["sequences"] == len(here)
            assert phase["sources"][name]["tokens"] == sum(row[2] for row in here)
    assert found["sources"]["a"]["epochs"] <= 3
    assert [(phase["from"], phase["to"]) for phase in found["phases"]] == [(0, 88), (88, 160)]
    assert found["phases"][1]["sources"]["b"]["asked_share"] == 0.8
    assert found["largest_deviation"] < (0.02 if packing == "concatenate" else 0.1)
    assert found["follows_the_order"]


def test_a_reader_with_different_tokens_is_detected(tmp_path: Path) -> None:
    recipe = recipe_of("concatenate")
    loader = open_loader(recipe, store_of(tmp_path, recipe, {"a": documents(1, 12), "b": documents(2, 40)}))
    batch = loader.batch(0, 8)
    batch = replace(batch, source=np.zeros_like(batch.source))
    given = counts_after(no_counts(loader.mixture), batch, loader.mixture)
    found = mixture_audit(loader.mixture, given, 8)
    assert not found["follows_the_order"]
    assert found["sources"]["a"]["drawn_share"] == 1.0
    assert found["largest_deviation"] > 0.5
