"""The objective applied to a model: its batches, the attention mask, the loss, and the scores on held-out text.

Shapes: B sequences, T tokens, D width, V vocabulary, N tokens with a target, C tokens of a chunk, S targets of a sequence (T,
or 1 for a class).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat, starmap
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bessemer.common.errors import InputError
from bessemer.common.extensions import failure
from bessemer.common.hashing import key_of
from bessemer.distributed.chunks import loss_chunk
from bessemer.distributed.context import LocalBatch, MicroBatchLoss
from bessemer.model.attention_scope import Documents
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config, read_config
from bessemer.model.kernels import upcast
from bessemer.model.transformer import Transformer
from bessemer.recipe import Recipe, ResolvedRecipe, Train
from bessemer.storage import hub
from bessemer.tokens.degenerate_text import DegenerateTextFilter
from bessemer.tokens.held_out import HeldOut, held_out_samples
from bessemer.tokens.loader import Batch, Bools, Loader, open_loader
from bessemer.tokens.packing import Ints
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.loss import Loss, chunked_cross_entropy
from bessemer.train.masking import Masked
from bessemer.train.objective import Objective, Predictions, Sample, objective_of, overrides

TRIED_SAMPLES = 8  # number of samples on which a user's objective is tried before the training
TargetLosses = tuple[Tensor, Tensor, Tensor | None]  # differentiable total; nats and predictions of the targets, (B, S)


@dataclass(frozen=True)
class ObjectiveTask:
    """The objective of a language model, as the step, the loop and the validation use it.

    Attributes:
        train: The [train] table of the recipe.
        end_of_text: The id of the token between documents.
        document_mask: True if attention stays within documents.
        is_encoder: True if attention sees both sides and hidden tokens are predicted.
    """

    train: Train
    end_of_text: int
    document_mask: bool = False
    is_encoder: bool = False

    @cached_property
    def objective(self) -> Objective:
        """The objective of the training. Scores on held-out text do not load it."""
        return objective_of(self.train)

    def prepare(self, model: Transformer) -> None:
        """Freeze the weights that are not trained."""

    def loader(self, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader:
        """Return the loader of a run's training batches."""
        gate = (DegenerateTextFilter.for_store(recipe, store).apply,) if recipe.tokens.gate else ()
        return open_loader(recipe, store, rank, world, (*gate, *example_transforms(recipe, store)))

    def held_out(self, recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
        """Return the sequences that a validation scores."""
        parts = held_out_samples(recipe, store, max_tokens)
        if not recipe.predicts_hidden:
            return parts
        examples = Examples.load(Masked(**dict(self.train.masking)), recipe, store)
        return [examples.held_out(part, store.token_bytes) for part in parts]

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        """Return the documents that mask the attention; None if attention spans whole sequences.

        They start where `starts_BT` is True, or without it after each end-of-text token.
        """
        if not self.document_mask:
            return None
        if starts_BT is None:
            return Documents.from_tokens(inputs_BT, self.end_of_text)
        return Documents.from_starts(starts_BT)

    def loss(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> MicroBatchLoss:
        """Return the loss over the valid targets (>= 0): the objective's own loss, or cross-entropy with the z-loss."""
        total, nats_BS, predicted_BS = self._losses(model, hidden_BTD, batch)
        correct_B = None if predicted_BS is None else (predicted_BS == batch.targets_BL)[:, 0]
        return MicroBatchLoss(total, nats_BS.detach().sum(dim=1), correct_B)

    def score(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> tuple[Tensor, Tensor | None]:
        """Return the nats of each target without the z-loss, and the likeliest prediction if it is scored; both (B, S)."""
        return self._losses(model, hidden_BTD, batch, scored=True)[1:]

    def synthetic_batch(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        """Return a batch of random tokens with a typical number of targets, for timing a step."""
        tokens = draw.integers(0, config.vocabulary, (rows, config.sequence_length + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if config.labels:
            targets = draw.integers(0, config.labels, (rows, 1))
        elif self.is_encoder:
            targets = np.where(draw.random(inputs.shape) < self.train.masking.share, inputs, -1)
        return Batch(0, inputs, targets, np.zeros(rows, dtype=np.int64))

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool = False
    ) -> TargetLosses:
        """Return the losses of a batch; if `scored`, cross-entropy without the z-loss, whatever the objective.

        In an encoder, only hidden tokens go through the head, and the likeliest predictions are scored. An objective's own loss
        is only in the total: the nats are the cross-entropy of its targets, by which runs are compared.
        """
        targets_BS, predicted_BS = batch.targets_BL, None
        is_own = not scored and overrides(self.objective, "loss")
        if not self.is_encoder and not is_own:
            loss = self._head_loss(model, hidden_BTD.flatten(0, 1), targets_BS.flatten(), scored=scored)
            return loss.total, loss.nats_N.view(targets_BS.shape), None
        counts_BS = targets_BS >= 0
        hidden_ND, targets_N = hidden_BTD[counts_BS], targets_BS[counts_BS]
        if scored:
            predicted_BS = torch.full_like(targets_BS, -1)
            chunks = torch.split(hidden_ND, self.train.loss_chunk)
            predicted_BS[counts_BS] = torch.cat([model.head.logits(hidden_CD).argmax(-1) for hidden_CD in chunks])
        if is_own:
            loss = self._own_loss(model, hidden_ND, targets_N, batch.inputs_BL, counts_BS.nonzero())
        else:
            loss = self._head_loss(model, hidden_ND, targets_N, scored=scored)
        nats_BS = loss.nats_N.new_zeros(targets_BS.shape)
        nats_BS[counts_BS] = loss.nats_N
        return loss.total, nats_BS, predicted_BS

    def _head_loss(self, model: Transformer, hidden_ND: Tensor, targets_N: Tensor, *, scored: bool) -> Loss:
        """Return the cross-entropy over the vocabulary, and the z-loss unless `scored`, of hidden states given to the head."""
        head, train = model.head, self.train
        return chunked_cross_entropy(
            head.transform(hidden_ND), head.weight, targets_N, bias_V=head.bias, chunk=train.loss_chunk,
            z_loss=0.0 if scored else train.z_loss, soft_cap=head.soft_cap or None, vocabulary=head.vocabulary,
        )  # fmt: skip

    def _own_loss(
        self, model: Transformer, hidden_ND: Tensor, targets_N: Tensor, inputs_BT: Tensor, places_N2: Tensor
    ) -> Loss:
        """Return the objective's own loss and the cross-entropy, with logits of only a chunk of the targets at a time.

        The backward pass recomputes the logits. `places_N2` has the sequence and position of each target.
        """

        def chunk_losses(hidden_CD: Tensor, targets_C: Tensor, places_C2: Tensor) -> tuple[Tensor, Tensor]:
            logits_CV = upcast(model.head.logits(hidden_CD))
            with torch.autocast(logits_CV.device.type, enabled=False):
                losses_C = own_loss(self.objective, Predictions(logits_CV, targets_C, inputs_BT, *places_C2.unbind(1)))
                return losses_C, F.cross_entropy(logits_CV.detach(), targets_C, reduction="none")

        chunk = loss_chunk(self.train.loss_chunk, model.config.vocabulary, hidden_ND.is_cuda)
        parts = zip(*(torch.split(column, chunk) for column in (hidden_ND, targets_N, places_N2)), strict=True)
        kept_less = partial(checkpoint, chunk_losses, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        losses, nats = zip(*starmap(kept_less, parts), strict=True)
        return Loss(torch.cat(losses).sum(), torch.cat(nats))


@dataclass(frozen=True)
class ClassifyTask(ObjectiveTask):
    """The objective in which each text predicts its label.

    In an encoder, a text starts and ends with special tokens, the first of which is not end-of-text.
    """

    def prepare(self, model: Transformer) -> None:
        if self.train.is_frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("classifier."))

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        return Documents.padded(self._lengths(inputs_BT), inputs_BT.shape[1])

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool = False
    ) -> TargetLosses:
        logits_BL = upcast(model.classifier(hidden_BTD, self._lengths(batch.inputs_BL), batch.masks))
        nats_B = F.cross_entropy(logits_BL, batch.targets_BL[:, 0], reduction="none", ignore_index=-1)
        return nats_B.sum(), nats_B[:, None], logits_BL.argmax(dim=1, keepdim=True)

    def _lengths(self, inputs_BT: Tensor) -> Tensor:
        """Return the number of tokens of each text (see `LabelledTexts`).

        The first token always counts, and end-of-text is padding.
        """
        lengths_B = 1 + (inputs_BT[:, 1:] != self.end_of_text).sum(dim=1)
        return lengths_B + (inputs_BT[:, 0] != self.end_of_text) if self.is_encoder else lengths_B


def task_of(train: Train, document_mask: bool, config: ModelConfig, end_of_text: int) -> ObjectiveTask:
    """Return the task of an objective that `require_objective` has accepted. A user's class is not loaded yet."""
    if train.objective == "classify":
        return ClassifyTask(train, end_of_text, is_encoder=not config.causal)
    return ObjectiveTask(train, end_of_text, document_mask, not config.causal)


def config_of(recipe: Recipe, vocabulary: int, labels: int) -> ModelConfig:
    """Return the model that a resolved recipe trains; `labels` is the number of classes of its corpus."""
    if recipe.train.objective != "classify":
        return model_config(recipe, vocabulary)
    config = model_config(recipe, vocabulary, labels=labels)
    pooling = recipe.train.classify.pooling
    if pooling is None and recipe.model.from_ is not None:
        source = read_config(hub.local_folder(recipe.model.from_, weights=False))
        pooling = source.pooling if source.labels else None
    return config if pooling is None else config.with_changes(pooling=pooling)


def example_transforms(recipe: Recipe, store: TokenStore) -> tuple[Callable[[Batch], Batch], ...]:
    """Return the functions by which a recipe's objective changes a batch, such as hiding tokens from an encoder."""
    objective = objective_of(recipe.train)
    return (Examples.load(objective, recipe, store).batch,) if overrides(objective, "example") else ()


@dataclass(frozen=True)
class Examples:
    """The inputs and targets that an objective makes of each sample, as a pure function of run seed and sample number.

    The random numbers are Philox's (Salmon et al. 2011), a counter-based generator with seed and sample as key. So examples do
    not depend on the micro-batch, the number of processes or a resume, and they differ in every epoch.

    Attributes:
        objective: The objective.
        key: The key of the random numbers.
        tokenizer: The tokenizer of the run.
        is_text: True for ids that are not special tokens, (V,).
    """

    objective: Objective
    key: int
    tokenizer: Tokenizer
    is_text: Bools

    @classmethod
    def load(cls, objective: Objective, recipe: Recipe, store: TokenStore) -> Self:
        """Read the tokenizer of a run. Raises InputError if an encoder's tokenizer has no mask token."""
        if store.mask_token is None and objective.model == "encoder":
            raise InputError(f"{store.folder}: no mask token; write the tokens again with train.objective = masked")
        tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
        tokenizer.mask_token = store.mask_token
        return cls(objective, key_of("masks", recipe.run.seed), tokenizer, store.token_bytes > 0)

    def batch(self, batch: Batch) -> Batch:
        """Return a batch with the inputs and targets of the objective."""
        starts = repeat(None) if batch.starts is None else batch.starts
        rows = zip(batch.samples.tolist(), batch.inputs, batch.targets, starts, strict=False)
        inputs, targets = zip(*(self.example(*row) for row in rows), strict=True)
        return replace(batch, inputs=np.stack(inputs), targets=np.stack(targets))

    def held_out(self, part: HeldOut, token_bytes: Ints) -> HeldOut:
        """Return held-out sequences with the inputs and targets of the objective, the same at every validation."""
        fixed = replace(self, key=key_of("held-out masks", part.source))
        batch = fixed.batch(Batch(0, part.inputs, part.targets, np.zeros(len(part.inputs), np.int64), part.starts))
        target_bytes = np.where(batch.targets >= 0, token_bytes[batch.targets], 0).sum(axis=1)
        return replace(part, inputs=batch.inputs, targets=batch.targets, bytes=target_bytes)

    def example(self, number: int, inputs_T: Ints, targets_T: Ints, starts_T: Bools | None = None) -> tuple[Ints, Ints]:
        """Return the inputs and targets of sample `number`. Raises UserCodeError if the objective fails."""
        draws = np.random.Generator(np.random.Philox(key=np.array([self.key, number], dtype=np.uint64)))
        try:
            example = self.objective.example(Sample(inputs_T, targets_T, starts_T, draws, self.tokenizer, self.is_text))
            for ids, least in zip(example, (0, -1), strict=True):
                fits = ids.shape == inputs_T.shape and ids.dtype.kind == "i"
                if not fits or ids.min() < least or ids.max() >= self.tokenizer.vocabulary:
                    what = f"{ids.dtype}{list(ids.shape)} from {ids.min()} to {ids.max()}"
                    raise ValueError(f"returned {what}; return integers {list(inputs_T.shape)}, ids of the vocabulary")
        except Exception as error:
            raise failure(self.objective, "example", error, f"sample {number}") from error
        return example


def own_loss(objective: Objective, predictions: Predictions) -> Tensor:
    """Return the loss of each target. Raises UserCodeError if the objective fails."""
    targets, logits = predictions.targets, predictions.logits
    if not len(targets):
        return logits.sum(dim=1)
    try:
        losses = objective.loss(predictions)
        if losses.shape != targets.shape or not losses.is_floating_point():
            what = f"{losses.dtype}{list(losses.shape)}"
            raise ValueError(f"returned {what}; return a number for each target, {list(targets.shape)}")
        if logits.requires_grad and not losses.requires_grad:
            raise ValueError("returned values without a gradient; compute them from predictions.logits")
    except Exception as error:
        raise failure(objective, "loss", error, f"{len(targets)} targets") from error
    return losses


def require_objective(
    recipe: ResolvedRecipe, config: ModelConfig, tokenizer: Callable[[], Tokenizer] | None = None
) -> None:
    """Raise InputError if the model or another key of the recipe does not fit its objective.

    `tokenizer` returns the tokenizer of the run or a similar one. If it is given, a user's objective is tried with it, and an
    error is raised if it fails.
    """
    train, layout = recipe.train, recipe.parallel
    objective, kind = objective_of(train), "decoder" if config.causal else "encoder"
    if objective.model not in (kind, "either"):
        remedy = "use another objective or model.family"
        raise InputError(f"train.objective: {train.objective} trains {objective.model}s, not {kind}s; {remedy}")
    if objective.model == "encoder" and not (overrides(objective, "example") and recipe.predicts_hidden):
        raise InputError(f"train.objective: {objective.name}: an encoder needs the method example, and model.family")
    if config.experts and config.experts_per_token == 1 and config.router_normalised:
        why = "the normalised weight of a token's only expert is always 1, so the loss does not train the router"
        raise InputError(f"model.router_normalised: {why}; set it to false")
    keys = {"train.z_loss": train.z_loss}
    keys |= {f"parallel.{axis}": getattr(layout, axis) - 1 for axis in ("tensor", "context", "pipeline")}
    for key in (key for key, value in keys.items() if value and overrides(objective, "loss")):
        raise InputError(f"{key}: not supported with the loss of {objective.name}; remove it")
    if tokenizer is not None and not train.objective_rule.is_built_in:
        _try(objective, recipe, tokenizer())


def _try(objective: Objective, recipe: ResolvedRecipe, tokenizer: Tokenizer) -> None:
    """Run an objective on random tokens, and raise an error if it fails or is not deterministic."""
    size = tokenizer.vocabulary
    tokens = np.random.default_rng(0).integers(0, size, recipe.tokens.sequence_length + 1)
    starts = None if recipe.tokens.packing == "concatenate" else tokens[1:] < 0
    examples = Examples(objective, 0, tokenizer, np.array([*map(bool, tokenizer.token_byte_values())]))
    for number in range(TRIED_SAMPLES):
        once, again = (examples.example(number, tokens[:-1].copy(), tokens[1:].copy(), starts) for _ in range(2))
        if not np.array_equal(once, again):
            why = "`example` is not deterministic; take random numbers from sample.random"
            raise InputError(f"train.objective: {objective.name}: {why}")
    zeros = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    logits, target = torch.zeros(1, size, requires_grad=True), torch.tensor([once[1].max()])
    own_loss(objective, Predictions(logits, target, torch.from_numpy(once[0])[None], *zeros))
