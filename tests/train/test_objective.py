import pytest
import torch

from bessemer.train.loss import chunked_cross_entropy
from tests.model.samples import LargestTensor


def plain(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The textbook's way, with all logits, through torch's own cross-entropy."""
    logits = torch.nn.functional.linear(hidden, head, bias)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    valid = targets >= 0
    nats = torch.nn.functional.cross_entropy(
        logits[valid], targets[valid], reduction="sum", label_smoothing=label_smoothing
    )
    return nats + z_loss * logits[valid].logsumexp(1).square().sum()


def drawn(tokens: int = 40, width: int = 16, vocabulary: int = 50) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(tokens, width, generator=generator),
        torch.randn(vocabulary, width, generator=generator),
        torch.randn(vocabulary, generator=generator),
        torch.randint(0, vocabulary, (tokens,), generator=generator),
    )


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize("missing", [0, 5])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"z_loss": 1e-2},
        {"label_smoothing": 0.1},
        {"soft_cap": 3.0},
        {"z_loss": 1e-2, "label_smoothing": 0.2, "soft_cap": 5.0},
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_plain_form(
    chunk: int, missing: int, with_bias: bool, terms: dict[str, float]
) -> None:
    hidden, head, bias, targets = drawn()
    targets[3 : 3 + missing] = -1
    inputs = [hidden, head, *([bias] if with_bias else [])]
    exact = [x.double().requires_grad_() for x in inputs]
    wanted = plain(exact[0], exact[1], targets, *exact[2:], **terms)
    (wanted / 7).backward()
    for x in inputs:
        x.requires_grad_()
    found = chunked_cross_entropy(hidden, head, targets, bias_V=bias if with_bias else None, chunk=chunk, **terms)
    (found.total / 7).backward()
    assert float(found.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    for x, y in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-5, atol=2e-6)
    # The reported loss is the plain cross-entropy, whatever is added to what is optimised.
    capped = {name: value for name, value in terms.items() if name == "soft_cap"}
    nats = plain(exact[0], exact[1], targets, *exact[2:], **capped)
    assert float(found.nats_N.double().sum()) == pytest.approx(float(nats.detach()), rel=1e-6)
    assert (found.nats_N[targets < 0] == 0).all()
    assert not found.nats_N.requires_grad


def test_an_uncounted_row_may_hold_anything() -> None:
    hidden, head, _, targets = drawn()
    hidden[4], targets[4] = float("nan"), -1
    head.requires_grad_()
    found = chunked_cross_entropy(hidden, head, targets, chunk=8)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert torch.isfinite(head.grad).all()


def test_no_valid_target_is_zero_and_not_nan() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.randn(10, 8, requires_grad=True)
    found = chunked_cross_entropy(hidden, head, torch.full((4,), -1), chunk=2)
    found.total.backward()
    assert float(found.total.detach()) == 0.0
    assert float(hidden.grad.abs().sum()) == float(head.grad.abs().sum()) == 0.0


def test_the_full_logits_are_never_held() -> None:
    """The largest tensor made is a chunk of logits, not all of them."""
    hidden, head = torch.randn(1024, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    targets = torch.randint(0, 500, (1024,))
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, head, targets, chunk=64).total.backward()
    assert largest.elements <= 64 * 500 < 1024 * 500
