"""Dropout in a training step: what the step computes does not depend on how it is cut or on what is recomputed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bessemer.tokens.loader import Batch
from bessemer.train.engine import MicroBatch
from bessemer.train.trainer import Trainer
from tests.train.small_trainer import batch, gradient, stats_of, trainer_of

DROPOUT = ("train.dropout.hidden=0.1", "train.dropout.attention=0.2")
FP64 = ("train.precision=fp64", "train.compile=off")


def found(trainer: Trainer, data: Batch) -> tuple[float, torch.Tensor]:
    loss = stats_of(trainer, data).loss
    return loss, gradient(trainer)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_masks_do_not_depend_on_micro_batch_or_recompute(recipe_file: Path, family: str) -> None:
    common = (*DROPOUT, *FP64, f"model.family={family}", *(("model.kv_heads=2",) if family == "gpt2" else ()))
    data = batch()
    loss, wanted = found(trainer_of(recipe_file, *common, "train.micro_batch=8"), data)
    for micro in (1, 2, 4):
        other, cut = found(trainer_of(recipe_file, *common, f"train.micro_batch={micro}"), data)
        assert abs(other - loss) < 1e-12
        assert float((cut - wanted).abs().max()) < 1e-12
    for mode in ("selective", "full"):
        assert (
            found(trainer_of(recipe_file, *common, "train.micro_batch=8", f"train.recompute={mode}"), data)[0] == loss
        )
        again = found(trainer_of(recipe_file, *common, "train.micro_batch=8", f"train.recompute={mode}"), data)[1]
        assert torch.equal(again, wanted), mode
    without, _ = found(trainer_of(recipe_file, *common[2:], "train.micro_batch=8"), data)
    assert abs(without - loss) > 1e-3, "dropout does something"


def test_masks_belong_to_the_sample(recipe_file: Path) -> None:
    """The two halves of a batch, as two processes have them, give the gradient of the whole; another step has other masks."""
    step, data = trainer_of(recipe_file, *DROPOUT, *FP64, "train.micro_batch=8"), batch()
    loss, wanted = found(step, data)
    later, _ = found(step, replace(data, first=8))
    seeded, _ = found(trainer_of(recipe_file, *DROPOUT, *FP64, "train.micro_batch=8", "run.seed=9"), data)
    assert abs(later - loss) > 1e-4 and abs(seeded - loss) > 1e-4
    assert data.part(1, 2).samples.tolist() == [1, 3, 5, 7]
    assert replace(data, first=8).samples.tolist() == list(range(8, 16))
    halves = [data.part(rank, 8) for rank in range(8)]
    parts = [found(step, half) for half in halves]
    assert abs(sum(part[0] for part in parts) / 8 - loss) < 1e-12
    assert float((torch.stack([part[1] for part in parts]).mean(dim=0) - wanted).abs().max()) < 1e-12


def test_scores_are_without_dropout(recipe_file: Path) -> None:
    data = batch()
    part = MicroBatch(torch.from_numpy(data.inputs), torch.from_numpy(data.targets), None)
    with torch.no_grad():
        one, other = (trainer_of(recipe_file, *FP64, *more).engine.score(part)[0] for more in (DROPOUT, ()))
    assert torch.equal(one, other)
