"""Each objective's loss and gradients compared with a plain computation over full logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.common.errors import InputError
from bessemer.distributed.step_flops import step_flops_per_token
from bessemer.model.flops import flops_per_token
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import load
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.tokens.tokenizer.description import WordEdges
from bessemer.train import masking
from bessemer.train import optimizer as optimizers
from bessemer.train.loss import chunked_cross_entropy
from bessemer.train.masking import Masked
from bessemer.train.task import Examples, config_of, require_objective
from bessemer.train.validation import validate
from tests.model.samples import LargestTensor
from tests.train.small_trainer import batch, gradient, stats_of, trainer_of

END, VOCABULARY, LABELS, LENGTH = 0, 400, 3, 32
MASKED = ("train.objective=masked", "model.family=modernbert", "model.kv_heads=2", "model.window=8")
CLASSIFY = ("train.objective=classify", "corpus.sources.prose.label=prose", "corpus.sources.code.label=code")
ENCODER = ("model.family=modernbert", "model.kv_heads=2")


def masked_batch() -> Batch:
    draw = np.random.default_rng(0)
    tokens = draw.integers(2, VOCABULARY, (8, LENGTH))
    tokens[:, 13] = END
    targets = np.where(draw.random(tokens.shape) < 0.2, draw.integers(2, VOCABULARY, tokens.shape), -1)
    targets[2] = -1  # a sequence without a target, and very unequal ones
    targets[5] = tokens[5]
    return Batch(0, tokens, targets, np.array([0, 1] * 4))


def labelled_batch() -> Batch:
    draw = np.random.default_rng(1)
    tokens = np.full((8, LENGTH), END)
    for row, length in enumerate([1, 2, 5, 31, 32, 17, 32, 8]):
        tokens[row, 1:length] = draw.integers(2, VOCABULARY, length - 1)
    return Batch(0, tokens, draw.integers(0, LABELS, (8, 1)), np.array([0, 1] * 4))


@pytest.mark.parametrize("mask", ["false", "true"])
def test_the_masked_loss_is_the_mean_over_hidden_tokens(recipe_file: Path, mask: str) -> None:
    trainer, data = trainer_of(recipe_file, *MASKED, f"tokens.document_mask={mask}"), masked_batch()
    found = stats_of(trainer, data)
    ours = gradient(trainer).clone()
    trainer.model.zero_grad()
    inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    logits = trainer.model.logits(inputs, trainer.task.documents(inputs))
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    plain.backward()
    assert found.loss == pytest.approx(float(plain.detach()), rel=1e-6)
    assert float((ours - gradient(trainer)).abs().max() / ours.abs().max()) <= 1e-5
    counted = (data.targets >= 0).sum(axis=1)
    assert found.targets == [int(counted[::2].sum()), int(counted[1::2].sum())]


def batch_with_holes() -> Batch:
    """Return a batch with unequal numbers of valid targets, including zero."""
    data = batch()
    targets = data.targets.copy()
    targets[0, :20], targets[3] = -1, -1
    return replace(data, targets=targets)


@pytest.mark.fault(28)
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize(
    ("objective", "data"),
    [((), batch()), ((), batch_with_holes()), (MASKED, masked_batch()), (CLASSIFY, labelled_batch())],
)
def test_the_gradient_does_not_depend_on_the_micro_batch(
    recipe_file: Path, micro: int, objective: tuple[str, ...], data: Batch
) -> None:
    whole = trainer_of(recipe_file, *objective, "train.micro_batch=8")
    cut = trainer_of(recipe_file, *objective, f"train.micro_batch={micro}")
    first, second = stats_of(whole, data), stats_of(cut, data)
    assert float((gradient(whole) - gradient(cut)).abs().max() / gradient(whole).abs().max()) <= 1e-6
    assert (second.loss, second.grad_norm) == pytest.approx((first.loss, first.grad_norm), rel=1e-6)
    assert (second.targets, second.accuracy) == (first.targets, first.accuracy)


@pytest.mark.parametrize("family", [(), ENCODER, ("model.family=bert", "model.kv_heads=2")])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_padding_does_not_change_the_class_of_a_text(recipe_file: Path, family: tuple[str, ...], pooling: str) -> None:
    """The loss is the mean over texts, each without its padding."""
    trainer, data = trainer_of(recipe_file, *CLASSIFY, *family, f"train.classify.pooling={pooling}"), labelled_batch()
    assert trainer.model.config.pooling == pooling
    found = stats_of(trainer, data)
    nats, right = [], []
    for tokens, target in zip(data.inputs, data.targets[:, 0], strict=True):
        length = 1 + int((tokens[1:] != END).sum())
        text = torch.from_numpy(tokens[None, :length])
        logits = trainer.model.classifier(trainer.model(text), torch.tensor([length]))
        nats.append(float(F.cross_entropy(logits, torch.tensor([target])).detach()))
        right.append(int(logits.argmax()) == target)
    assert found.loss == pytest.approx(np.mean(nats), rel=1e-5)
    assert found.accuracy == pytest.approx(np.mean(right))
    assert found.targets == [4, 4]


@pytest.mark.parametrize("family", [(), ENCODER])
def test_a_frozen_transformer_has_no_gradients_no_state_and_no_updates(
    recipe_file: Path, family: tuple[str, ...]
) -> None:
    trainer = trainer_of(recipe_file, *CLASSIFY, *family, "train.classify.frozen=true")
    free = trainer_of(recipe_file, *CLASSIFY, *family)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    first, second = trainer.forward_backward(labelled_batch()), free.forward_backward(labelled_batch())
    assert float(first.loss) == float(second.loss)
    heads = [name for name in before if name.startswith("classifier.")]
    for (name, parameter), (_, theirs) in zip(
        trainer.model.named_parameters(), free.model.named_parameters(), strict=True
    ):
        if name in heads:
            torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        else:
            assert parameter.grad is None
    trainer.update(0, first.grad_norm)
    state = optimizers.state_tensors(trainer.model, trainer.optimizer)
    assert {name.rpartition("/")[0] for name in state} == set(heads)
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved <= set(heads) and "classifier.weight" in moved


def test_validation_of_hidden_tokens_equals_manual_values(recipe_file: Path) -> None:
    trainer, data = trainer_of(recipe_file, *MASKED, "train.micro_batch=2", "train.loss_chunk=3"), masked_batch()
    part = HeldOut("code", data.inputs, data.targets, np.ones(8, dtype=np.int64))
    found = validate(trainer, [part])
    with torch.no_grad():
        logits = trainer.model.logits(torch.from_numpy(data.inputs)).double()
    targets = torch.from_numpy(data.targets)
    assert found.loss == pytest.approx(
        float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)), rel=1e-5
    )
    counts = targets >= 0
    assert found.accuracy == pytest.approx(float((logits.argmax(dim=-1) == targets)[counts].double().mean()))
    assert (found.bits_per_byte, found.confusion, found.tokens) == (None, None, int(counts.sum()))
    assert "bits_per_byte" not in found.metrics


def test_validation_of_a_classifier_gives_its_confusion_matrix(recipe_file: Path) -> None:
    trainer, data = trainer_of(recipe_file, *CLASSIFY, "train.micro_batch=4"), labelled_batch()
    with torch.no_grad():
        inputs = torch.from_numpy(data.inputs)
        lengths = 1 + (inputs[:, 1:] != END).sum(dim=1)
        taken = trainer.model.classifier(trainer.hidden(inputs), lengths).argmax(dim=1).numpy()
    wanted = [[int(((data.targets[:, 0] == row) & (taken == column)).sum()) for column in range(3)] for row in range(3)]
    parts = [
        HeldOut(name, data.inputs[rows], data.targets[rows], np.ones(4, dtype=np.int64))
        for name, rows in (("prose", slice(0, 4)), ("code", slice(4, 8)))
    ]
    found = validate(trainer, parts)
    assert found.confusion == wanted
    assert found.accuracy == sum(wanted[n][n] for n in range(3)) / 8
    assert found.tokens == 8


def test_an_objective_for_the_other_kind_of_model_is_an_error(recipe_file: Path) -> None:
    decoder, encoder = (resolve(load(recipe_file, sets), VOCABULARY) for sets in ((), MASKED))
    with pytest.raises(InputError, match=r"train\.objective: causal"):
        require_objective(decoder, config_of(encoder, VOCABULARY, 0))
    with pytest.raises(InputError, match=r"train\.objective: masked"):
        require_objective(encoder, config_of(decoder, VOCABULARY, 0))


@pytest.mark.parametrize("objective", [(), MASKED, CLASSIFY])
def test_a_generated_batch_can_be_trained_on(recipe_file: Path, objective: tuple[str, ...]) -> None:
    trainer = trainer_of(recipe_file, *objective)
    found = stats_of(trainer, trainer.task.synthetic_batch(np.random.default_rng(0), 4, trainer.model.config))
    assert np.isfinite(found.loss) and found.grad_norm > 0


def test_flops_of_an_objective(recipe_file: Path) -> None:
    """Only hidden tokens multiply the output matrix; a frozen transformer has only the forward pass."""
    masked, frozen = load(recipe_file, MASKED), load(recipe_file, [*CLASSIFY, "train.classify.frozen=true"])
    config = config_of(resolve(masked, VOCABULARY), VOCABULARY, 0)
    saved = 6 * 0.85 * (VOCABULARY * 32 + 32 * 32)
    assert step_flops_per_token(masked.train, config) == pytest.approx(flops_per_token(config) - saved)
    config = config_of(resolve(frozen, VOCABULARY), VOCABULARY, LABELS)
    assert step_flops_per_token(frozen.train, config) == pytest.approx(flops_per_token(config) / 3)


MASK, NUM_IDS = 1, 500
ORDINARY = np.arange(NUM_IDS) >= 2


class TokenizerOfIds:
    mask_token, vocabulary = MASK, NUM_IDS


def masker(**settings: object) -> Examples:
    return Examples(Masked(**settings), 5, TokenizerOfIds(), ORDINARY)  # type: ignore[arg-type]


def text(length: int = 200, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(2, NUM_IDS, length)
    ids[[0, 40, 41, 150][: max(length // 50, 1)]] = END
    return ids


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("length", [200, 50, 7])
def test_exactly_the_given_share_is_hidden(share: float, length: int) -> None:
    ids = text(length)
    wanted = max(round(share * int((ids != END).sum())), 1)
    for sample in range(50):
        inputs, targets = masker(share=share, mode="all").example(sample, ids, ids)
        hidden = targets >= 0
        assert hidden.sum() == wanted
        assert (inputs[hidden] == MASK).all()
        assert np.array_equal(targets[hidden], ids[hidden])
        assert np.array_equal(inputs[~hidden], ids[~hidden])
        assert not hidden[ids == END].any()


def test_hidden_tokens_are_masked_random_and_kept_by_eighty_ten_ten() -> None:
    """Among many hidden tokens the shares are within five standard deviations of a binomial law, with random tokens over all
    ordinary ids.
    """
    ids, one = text(), masker(mode="bert")
    masked = other = kept = 0
    seen = np.zeros(NUM_IDS, dtype=np.int64)
    for sample in range(4000):
        inputs, targets = one.example(sample, ids, ids)
        hidden = targets >= 0
        now, true = inputs[hidden], ids[hidden]
        masked += int((now == MASK).sum())
        kept += int((now == true).sum())
        other += int(((now != true) & (now != MASK)).sum())
        np.add.at(seen, now[(now != MASK) & (now != true)], 1)
        assert (inputs == END).sum() == (ids == END).sum()
    total = masked + other + kept
    assert total == 4000 * round(0.15 * 196)
    # A random token equals the true one once in 498 times and then counts as kept.
    for found, share in ((masked, 0.8), (other, 0.1 * 497 / 498), (kept, 0.1 + 0.1 / 498)):
        assert abs(found - share * total) <= 5 * (total * share * (1 - share)) ** 0.5
    assert seen[:2].sum() == 0
    expected = other / 498
    assert ((seen[2:] - expected) ** 2 / expected).sum() <= 498 + 5 * (
        2 * 498
    ) ** 0.5  # chi-squared over the vocabulary


def test_the_draws_equal_philox() -> None:
    """Hidden positions are those of the smallest raw numbers, so that no library's shuffle is involved."""
    ids = text()
    candidates = np.flatnonzero(ids != END)
    raw = np.random.Philox(key=np.array([5, 77], dtype=np.uint64)).random_raw(len(candidates)).tolist()
    ranked = sorted(range(len(candidates)), key=lambda place: raw[place] >> 11)
    wanted = sorted(int(candidates[place]) for place in ranked[: round(0.15 * len(candidates))])
    assert np.flatnonzero(masker().example(77, ids, ids)[1] >= 0).tolist() == wanted


def test_whole_words_are_hidden_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = np.arange(NUM_IDS) % 3 == 0  # every third id begins a word
    opens[:2] = True
    edges = WordEdges(opens, np.arange(NUM_IDS) < 2)
    monkeypatch.setattr(masking, "word_edges", lambda _: edges)
    for seed in range(40):
        ids = text(seed=seed)
        starts = edges.starts(ids)
        words = np.cumsum(starts)
        _, targets = masker(whole_words=True).example(seed, ids, ids)
        hidden = targets >= 0
        budget = round(0.15 * int((ids != END).sum()))
        for word in np.unique(words[hidden]):
            assert hidden[words == word].all()
        assert budget - 1 <= hidden.sum() <= budget  # words of one token fill the remainder
        assert not hidden[ids == END].any()


def test_a_word_longer_than_the_share_is_cut_if_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = WordEdges(np.arange(NUM_IDS) < 2, np.arange(NUM_IDS) < 2)  # all text is one word
    monkeypatch.setattr(masking, "word_edges", lambda _: edges)
    ids = text(50)
    _, targets = masker(whole_words=True).example(0, ids, ids)
    assert (targets >= 0).sum() == round(0.15 * int((ids != END).sum()))


def test_there_is_a_target_unless_there_is_no_text() -> None:
    ids = np.full(30, END)
    inputs, targets = masker().example(0, ids, ids)
    assert np.array_equal(inputs, ids) and (targets == -1).all()
    ids[7] = 9
    assert masker(share=0.01).example(0, ids, ids)[1].tolist() == [-1] * 7 + [9] + [-1] * 22


def test_masks_do_not_depend_on_the_split_of_a_batch() -> None:
    tokens = np.stack([np.append(text(seed=row), 9) for row in range(12)])
    source = np.zeros(12, dtype=np.int64)
    whole = masker().batch(Batch.next_token(100, tokens, source))
    assert whole.inputs.shape == whole.targets.shape == (12, 200)
    for world in (2, 3):
        for rank in range(world):
            part = masker().batch(Batch.next_token(100, tokens, source).part(rank, world))
            assert np.array_equal(part.inputs, whole.inputs[rank::world])
            assert np.array_equal(part.targets, whole.targets[rank::world])
    later = masker().batch(Batch.next_token(104, tokens[4:], source[4:]))
    assert np.array_equal(later.inputs, whole.inputs[4:])


def plain(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return the textbook loss over all logits, with torch's cross-entropy."""
    logits = torch.nn.functional.linear(hidden, head, bias)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    valid = targets >= 0
    nats = torch.nn.functional.cross_entropy(logits[valid], targets[valid], reduction="sum")
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
@pytest.mark.parametrize("terms", [{}, {"z_loss": 1e-2}, {"soft_cap": 3.0}, {"z_loss": 1e-2, "soft_cap": 5.0}], ids=str)
def test_loss_and_gradients_equal_the_plain_computation(
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
    # The reported loss is the plain cross-entropy, without terms added for the optimizer.
    capped = {name: value for name, value in terms.items() if name == "soft_cap"}
    nats = plain(exact[0], exact[1], targets, *exact[2:], **capped)
    assert float(found.nats_N.double().sum()) == pytest.approx(float(nats.detach()), rel=1e-6)
    assert (found.nats_N[targets < 0] == 0).all()
    assert not found.nats_N.requires_grad


def test_masked_rows_may_contain_anything() -> None:
    hidden, head, _, targets = drawn()
    hidden[4], targets[4] = float("nan"), -1
    head.requires_grad_()
    found = chunked_cross_entropy(hidden, head, targets, chunk=8)
    found.total.backward()
    assert torch.isfinite(found.total)
    assert torch.isfinite(head.grad).all()


def test_the_loss_without_valid_targets_is_zero() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.randn(10, 8, requires_grad=True)
    found = chunked_cross_entropy(hidden, head, torch.full((4,), -1), chunk=2)
    found.total.backward()
    assert float(found.total.detach()) == 0.0
    assert float(hidden.grad.abs().sum()) == float(head.grad.abs().sum()) == 0.0


def test_the_full_logits_are_never_allocated() -> None:
    """The largest tensor is a chunk of logits, not all of them."""
    hidden, head = torch.randn(1024, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    targets = torch.randint(0, 500, (1024,))
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, head, targets, chunk=64).total.backward()
    assert largest.elements <= 64 * 500 < 1024 * 500
