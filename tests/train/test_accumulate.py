from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bessemer.distributed.context import MicroBatchLoss
from bessemer.train import engine as module
from bessemer.train.engine import accumulate
from tests.train.small_trainer import batch, gradient, stats_of, trainer_of


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.usefixtures("one_thread")
def test_two_at_a_time_gives_the_same_bits(recipe_file: Path, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pool", lambda threads, pool=module._pool: pool(1))
    alone, together = (trainer_of(recipe_file, f"train.micro_batch={micro}") for _ in range(2))
    found = stats_of(alone, batch())
    monkeypatch.setattr("bessemer.train.engine.runs_two_at_a_time", lambda *arguments: True)
    for _ in range(3):
        again = stats_of(together, batch())
        assert again == found
        assert torch.equal(gradient(together), gradient(alone))


@pytest.mark.parametrize("two", [False, True])
def test_the_sum_is_divided_and_in_order(two: bool) -> None:
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
