"""Gradients that autograd does not carry are those that it would carry."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bessemer.model import casts
from tests.train.small_trainer import batch, gradient, trainer_of


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
