"""Gradients that autograd does not carry are those that it would carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bessemer.model import casts
from tests.train.test_trainer import batch, gradient, trainer_of


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.tie_embeddings=true",),
        ("model.tie_embeddings=false", "train.loss_chunk=16"),
        ("train.recompute=full",),
    ],
)
@pytest.mark.parametrize("two", [False, True])
def test_collected_gradients_are_those_of_autograd(
    recipe_file: Path, overrides: tuple[str, ...], two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.train.engine.runs_two_at_a_time", lambda *arguments: two)
    ours, plain = (trainer_of(recipe_file, "train.precision=bf16", "train.micro_batch=2", *overrides) for _ in range(2))
    counts, additions = list[int](), casts.additions

    @contextmanager
    def counted() -> Iterator[casts.Additions]:
        with additions() as found:
            yield found
        counts.append(len(found))

    monkeypatch.setattr(casts, "additions", counted)
    found = ours.forward_backward(batch())
    monkeypatch.setattr(casts, "are_collected", lambda weight: False)
    assert plain.forward_backward(batch()).loss == found.loss
    matrices = sum(p.ndim == 2 for p in ours.model.parameters())
    assert len(counts) == 8 and counts[0] >= matrices and not counts[-1]
    exact, scale = gradient(plain), gradient(plain).abs().max()
    assert float((gradient(ours) - exact).abs().max() / scale) < 1e-6


def test_a_view_of_a_parameter_adds_to_its_part() -> None:
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    gradient = torch.arange(8.0).view(2, 4).bfloat16()
    with casts.casts_kept([weight]), casts.additions() as found:
        assert casts.collect(weight[2:4], gradient, torch.tensor(0.5))
        assert casts.collect(weight.view(2, 3, 4)[:, 1], gradient.float())  # its rows 1 and 4, which are not contiguous
        assert not casts.collect(torch.zeros(2, 4), gradient)
        for add in found:
            add()
    expected = torch.zeros(6, 4)
    expected[2:4] += 0.5 * gradient.float()
    expected[[1, 4]] += gradient.float()
    assert weight.grad is not None and torch.equal(weight.grad, expected)


def test_parameters_that_share_memory_are_left_to_autograd() -> None:
    flat = torch.zeros(8)
    with casts.casts_kept([torch.nn.Parameter(flat[:4])]), casts.additions():
        assert not casts.collect(flat[:4], torch.ones(4))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    with casts.casts_kept([weight]):  # outside of `additions`
        torch.autograd.backward(casts.look_up(torch.tensor([0, 2, 2]), weight).sum())
    assert weight.grad is not None and weight.grad[:, 0].tolist() == [1.0, 0.0, 2.0]
