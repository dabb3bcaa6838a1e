from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.recipe import load
from bessemer.train.device import choose
from bessemer.train.trainer import Trainer
from tests.train.small_trainer import batch, gradient, stats_of, trainer_of


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.fault(28)
def test_the_gradient_does_not_depend_on_the_micro_batch(recipe_file: Path, micro: int, holes: bool) -> None:
    """Accumulation over unequal and even zero valid tokens gives the whole batch's gradient."""
    whole, cut = trainer_of(recipe_file, "train.micro_batch=8"), trainer_of(recipe_file, f"train.micro_batch={micro}")
    data = batch()
    if holes:
        data.targets[0] = np.where(np.arange(32) < 20, -1, data.targets[0])
        data.targets[3] = -1
        for trainer in (whole, cut):
            module = trainer.engine.root
            original = module.forward
            module.forward = lambda i, t, *rest, original=original: original(i.clamp(min=0), t, *rest)
        assert (data.targets < 0).sum() == 52
    first, second = stats_of(whole, data), stats_of(cut, data)
    scale = gradient(whole).abs().max()
    assert float((gradient(whole) - gradient(cut)).abs().max() / scale) <= 1e-6
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
    assert second.targets == first.targets


def test_losses_by_source_add_up(recipe_file: Path) -> None:
    found = stats_of(trainer_of(recipe_file), batch())
    assert found.targets == [128, 128]
    assert sum(found.nats) / 256 == pytest.approx(found.loss, rel=1e-9)


def test_an_update_is_adamw_by_hand(recipe_file: Path) -> None:
    """Clipped, bias-corrected, decoupled decay on matrices only, in float64."""
    trainer = trainer_of(recipe_file, "train.optimizer.clip_norm=0.2", "train.optimizer.weight_decay=0.3", "train.schedule.warmup_steps=0",
                   "train.schedule.final_share=1.0", "train.optimizer.embedding_rate=2.0")  # fmt: skip
    norm = trainer.forward_backward(batch()).grad_norm
    before = {name: parameter.detach().double().clone() for name, parameter in trainer.model.named_parameters()}
    gradients = {name: parameter.grad.double().clone() for name, parameter in trainer.model.named_parameters()}
    assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in gradients.values()]).norm()), rel=1e-6)
    assert norm > 0.2
    rate = trainer.update(0, norm)
    assert rate == pytest.approx(0.01)
    assert all(parameter.grad is None for parameter in trainer.model.parameters()), (
        "a validation or a save takes its memory"
    )
    for name, parameter in trainer.model.named_parameters():
        g = gradients[name] * 0.2 / (float(norm) + 1e-6)
        lr = rate * (2.0 if name == "embedding.weight" else 1.0)
        decay = 0.3 if parameter.dim() >= 2 and name not in ("embedding.weight", "head.weight") else 0.0
        wanted = before[name] * (1 - lr * decay) - lr * g / (
            g.abs() + 1e-8
        )  # the first step: m/v are corrected to g, g^2
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=0, atol=2e-5)


def test_what_cannot_be_had_is_refused(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.common.errors import InputError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="cuda was asked for"):
        choose(load(recipe_file, ["train.device=cuda"]).train)


def test_the_document_mask_reaches_the_model(recipe_file: Path) -> None:
    data = batch()
    data.inputs[:, 16] = 0
    masked, open_ = trainer_of(recipe_file, "tokens.document_mask=true"), trainer_of(recipe_file)
    changed = data.inputs.copy()
    changed[:, :10] = 7  # other first documents
    tail = slice(17, 33)

    def logits(trainer: Trainer, tokens: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(tokens)
        return trainer.model(inputs, trainer.task.documents(inputs))[:, tail]

    assert torch.equal(logits(masked, data.inputs), logits(masked, changed))
    assert not torch.allclose(logits(open_, data.inputs), logits(open_, changed))
