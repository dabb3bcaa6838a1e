"""Each objective's loss and gradients against a plain computation over full logits, and what it leaves alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.common.errors import InputError
from bessemer.model.flops import flops_per_token, step_flops_per_token
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import load
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train.device import choose
from bessemer.train.objective import config_of
from bessemer.train.trainer import Trainer
from bessemer.train.validation import validate
from tests.train.small_trainer import stats_of

END, VOCABULARY, LABELS, LENGTH = 0, 400, 3, 32
MASKED = ("train.objective=masked", "model.family=modernbert", "model.kv_heads=2", "model.window=8")
CLASSIFY = (
    "train.objective=classify",
    "corpus.sources.prose.label=prose",
    "corpus.sources.code.label=code",
)
ENCODER = ("model.family=modernbert", "model.kv_heads=2")


def trainer_of(recipe_file: Path, *overrides: str) -> Trainer:
    recipe = resolve(load(recipe_file, overrides), VOCABULARY)
    model = build_model(config_of(recipe, VOCABULARY, LABELS), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return Trainer(recipe, model, choose(recipe.train), END, 2)


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


def gradient(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
    )


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


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize(("objective", "data"), [(MASKED, masked_batch()), (CLASSIFY, labelled_batch())])
def test_the_gradient_does_not_depend_on_the_micro_batch(
    recipe_file: Path, micro: int, objective: tuple[str, ...], data: Batch
) -> None:
    whole = trainer_of(recipe_file, *objective, "train.micro_batch=8")
    cut = trainer_of(recipe_file, *objective, f"train.micro_batch={micro}")
    first, second = stats_of(whole, data), stats_of(cut, data)
    assert float((gradient(whole) - gradient(cut)).abs().max() / gradient(whole).abs().max()) <= 1e-6
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert (second.targets, second.accuracy) == (first.targets, first.accuracy)


@pytest.mark.parametrize("family", [(), ENCODER, ("model.family=bert", "model.kv_heads=2")])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_text_is_classed_as_if_it_stood_alone(recipe_file: Path, family: tuple[str, ...], pooling: str) -> None:
    """The loss is the mean over texts, each seen without its padding."""
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
def test_a_frozen_transformer_has_no_gradients_no_state_and_does_not_move(
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


def test_validation_of_hidden_tokens_by_hand(recipe_file: Path) -> None:
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


def test_validation_of_a_classifier_counts_who_is_taken_for_whom(recipe_file: Path) -> None:
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


def test_an_objective_of_the_other_kind_is_refused(recipe_file: Path) -> None:
    from bessemer.train.objective import task_of

    decoder, encoder = trainer_of(recipe_file), trainer_of(recipe_file, *MASKED)
    with pytest.raises(InputError, match="causal needs a decoder, the model is an encoder"):
        task_of(load(recipe_file).train, False, encoder.model.config, END)
    with pytest.raises(InputError, match="masked needs an encoder, the model is a decoder"):
        task_of(load(recipe_file, MASKED).train, False, decoder.model.config, END)


@pytest.mark.parametrize("objective", [(), MASKED, CLASSIFY])
def test_a_made_up_batch_is_work_for_a_step(recipe_file: Path, objective: tuple[str, ...]) -> None:
    trainer = trainer_of(recipe_file, *objective)
    found = stats_of(trainer, trainer.task.made_up(np.random.default_rng(0), 4, trainer.model.config))
    assert np.isfinite(found.loss) and found.grad_norm > 0


def test_flops_of_an_objective(recipe_file: Path) -> None:
    """Hidden tokens alone meet the output matrix; a frozen transformer only goes forward."""
    masked, frozen = load(recipe_file, MASKED), load(recipe_file, [*CLASSIFY, "train.classify.frozen=true"])
    config = config_of(resolve(masked, VOCABULARY), VOCABULARY, 0)
    saved = 6 * 0.85 * (VOCABULARY * 32 + 32 * 32)
    assert step_flops_per_token(masked.train, config) == pytest.approx(flops_per_token(config) - saved)
    config = config_of(resolve(frozen, VOCABULARY), VOCABULARY, LABELS)
    assert step_flops_per_token(frozen.train, config) == pytest.approx(flops_per_token(config) / 3)
