from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bessemer.distributed.context import MicroBatchLoss
from bessemer.recipe import load
from bessemer.tokens.loader import Batch
from bessemer.train import engine as module
from bessemer.train.device import choose
from bessemer.train.engine import MicroBatch, accumulate
from bessemer.train.optimizer import WeightAverage
from bessemer.train.trainer import Trainer
from tests.train.small_trainer import batch, gradient, stats_of, trainer_of


def test_losses_by_source_add_up(recipe_file: Path) -> None:
    found = stats_of(trainer_of(recipe_file), batch())
    assert found.targets == [128, 128]
    assert sum(found.nats) / 256 == pytest.approx(found.loss, rel=1e-9)


def test_an_update_equals_adamw(recipe_file: Path) -> None:
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
        # In the first step m and v are corrected to g and g^2.
        wanted = before[name] * (1 - lr * decay) - lr * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=0, atol=2e-5)


def test_a_missing_device_is_an_error(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.common.errors import InputError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"train\.device"):
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.usefixtures("one_thread")
def test_two_workers_give_the_same_bits(recipe_file: Path, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pool", lambda threads, pool=module._pool: pool(1))
    alone, together = (trainer_of(recipe_file, f"train.micro_batch={micro}") for _ in range(2))
    found = stats_of(alone, batch())
    monkeypatch.setattr("bessemer.train.engine.runs_two_at_a_time", lambda *arguments: True)
    for _ in range(3):
        again = stats_of(together, batch())
        assert again == found
        assert torch.equal(gradient(together), gradient(alone))


@pytest.mark.parametrize("two", [False, True])
def test_losses_are_divided_and_returned_in_order(two: bool) -> None:
    weight, frozen, unused = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(2, requires_grad=True)
    losses = [lambda n=n: MicroBatchLoss((n * weight * frozen).sum(), torch.tensor([n])) for n in range(5)]
    known = accumulate(losses, [weight, frozen, unused], torch.tensor(4), torch.tensor(8.0), two_at_a_time=two)  # type: ignore[arg-type]
    assert [int(found.nats_B) for found in known] == list(range(5))
    assert not any(found.total.requires_grad for found in known)
    assert torch.equal(weight.grad, torch.full((3,), 20.0))
    assert frozen.grad is None
    assert unused.grad is None


def test_an_error_in_a_worker_is_raised() -> None:
    def broken() -> MicroBatchLoss:
        raise ZeroDivisionError

    one = torch.ones(())
    with pytest.raises(ZeroDivisionError):
        accumulate([broken, broken, broken], [torch.ones(1, requires_grad=True)], one, one, two_at_a_time=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_the_weight_average_equals_its_formula(decay: float) -> None:
    made = model()
    average = WeightAverage(made, decay)
    wanted = {name: weight.detach().double().numpy() for name, weight in made.named_parameters()}
    for step in range(30):
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(torch.randn(weight.shape))
        average.update(step, torch.tensor(0.0))
        d = min(decay, (1 + step) / (10 + step))
        for name, weight in made.named_parameters():
            wanted[name] = d * wanted[name] + (1 - d) * weight.detach().double().numpy()
    for name, found in average.tensors.items():
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.double().numpy(), wanted[name], rtol=0, atol=2e-6)


def test_swapping_the_average_in_and_out_is_exact() -> None:
    made = model()
    average = WeightAverage(made, 0.9)
    with torch.no_grad():
        made.weight.mul_(1.2345)
    average.update(50, torch.tensor(0.0))
    trained, averaged = made.weight.detach().clone(), average.tensors["weight"].clone()
    assert not torch.equal(trained, averaged)
    with average.swap_in():
        assert torch.equal(made.weight, averaged)
    assert torch.equal(made.weight, trained)
    assert torch.equal(average.tensors["weight"], averaged)


DROPOUT = ("train.dropout.hidden=0.1", "train.dropout.attention=0.2")
FP64 = ("train.precision=fp64", "train.compile=off")


def found(trainer: Trainer, data: Batch) -> tuple[float, torch.Tensor]:
    loss = stats_of(trainer, data).loss
    return loss, gradient(trainer)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_dropout_masks_do_not_depend_on_micro_batch_or_recompute(recipe_file: Path, family: str) -> None:
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


def test_dropout_masks_depend_on_the_sample(recipe_file: Path) -> None:
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
