"""The objectives: causal and masked language modelling, classification. A task defines the batches of a run, the mask of its
attention, its loss, and the scores on held-out text; nothing else depends on the objective.

Shapes: B sequences, T tokens, D width, V vocabulary, N tokens that count, C of a chunk, S targets of a sequence: T, or 1 of a
class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.common.hashing import key_of
from bessemer.distributed.context import LocalBatch, MicroBatchLoss
from bessemer.model.attention_scope import Documents
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config, read_config
from bessemer.model.kernels import upcast
from bessemer.model.transformer import Transformer
from bessemer.recipe import Masking, Recipe, Train
from bessemer.storage import hub
from bessemer.tokens.degenerate_text import DegenerateTextFilter
from bessemer.tokens.held_out import HeldOut, held_out_samples
from bessemer.tokens.loader import Batch, Loader, open_loader
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import WordEdges
from bessemer.train.loss import Loss, chunked_cross_entropy

MASKED, RANDOM = 0.8, 0.9  # below the first a hidden token becomes the mask token, below the second a random one
Ids = npt.NDArray[np.int64]
TargetLosses = tuple[Tensor, Tensor, Tensor | None]  # the differentiable total; nats and predictions by target, (B, S)


@dataclass(frozen=True)
class TrainingObjective(ABC):
    """What an objective provides to the step, the loop and the validation. document_mask: attention stays within documents."""

    train: Train
    end_of_text: int
    document_mask: bool = False
    counts_bytes: ClassVar[bool] = False  # whether the targets are the whole text, so that bits per byte are defined

    def prepare(self, model: Transformer) -> None:  # noqa: B027 (few objectives freeze weights)
        """Freeze the weights that are not trained."""

    def loader(self, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader:
        """The training batches of a run."""
        return open_loader(
            recipe, store, rank, world, (DegenerateTextFilter.of(recipe, store).apply,) if recipe.tokens.gate else ()
        )

    def held_out(self, recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
        """The sequences that a validation scores."""
        return held_out_samples(recipe, store, max_tokens)

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        """The documents that attention is masked by, from the packing (starts_BT: where pieces begin) or from end-of-text
        tokens; None: sequences only."""
        if not self.document_mask:
            return None
        if starts_BT is None:
            return Documents.from_tokens(inputs_BT, self.end_of_text)
        return Documents.from_starts(starts_BT)

    def loss(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> MicroBatchLoss:
        """Cross-entropy over the targets that count (>= 0), with the recipe's z-loss and label smoothing."""
        total, nats_BS, predicted_BS = self._losses(model, hidden_BTD, batch, scored=False)
        correct_B = None if predicted_BS is None else (predicted_BS == batch.targets_BL)[:, 0]
        return MicroBatchLoss(total, nats_BS.detach().sum(dim=1), correct_B)

    def score(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> tuple[Tensor, Tensor | None]:
        """Nats of each target without z-loss and label smoothing, and the likeliest prediction where scored; both (B, S)."""
        return self._losses(model, hidden_BTD, batch, scored=True)[1:]

    @abstractmethod
    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        """Return a batch of random tokens with a typical number of targets, to time a step."""

    @abstractmethod
    def _losses(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool) -> TargetLosses:
        """Return the losses of a batch, without z-loss and label smoothing if `scored`."""

    def _head_loss(self, model: Transformer, hidden_ND: Tensor, targets_N: Tensor, *, scored: bool) -> Loss:
        """Cross-entropy of the model's predictions over its vocabulary."""
        head, train = model.head, self.train
        return chunked_cross_entropy(
            head.transform(hidden_ND), head.weight, targets_N, bias_V=head.bias, chunk=train.loss_chunk,
            z_loss=0.0 if scored else train.z_loss,
            label_smoothing=0.0 if scored else train.label_smoothing, soft_cap=head.soft_cap or None,
            vocabulary=head.vocabulary,
        )  # fmt: skip


def task_of(train: Train, document_mask: bool, config: ModelConfig, end_of_text: int) -> TrainingObjective:
    """The task of an objective. Raises InputError when the model does not fit the objective."""
    objective = train.objective
    if objective == "classify":
        return ClassifyTask(train, end_of_text, is_encoder=not config.causal)
    if config.causal != (objective == "causal"):
        kind, other = ("a decoder", "an encoder") if config.causal else ("an encoder", "a decoder")
        remedy = "train.objective = " + ("causal" if config.causal else "masked")
        raise InputError(f"train.objective: {objective} needs {other}, the model is {kind}; set {remedy}")
    return (Masked if objective == "masked" else Causal)(train, end_of_text, document_mask)


def config_of(recipe: Recipe, vocabulary: int, labels: int) -> ModelConfig:
    """The model that a resolved recipe trains. labels: classes of its corpus."""
    if recipe.train.objective != "classify":
        return model_config(recipe, vocabulary)
    config = model_config(recipe, vocabulary, labels=labels)
    pooling = recipe.train.classify.pooling
    if pooling is None and recipe.model.from_ is not None:
        source = read_config(hub.local_folder(recipe.model.from_, weights=False))
        pooling = source.pooling if source.labels else None
    return config if pooling is None else config.with_changes(pooling=pooling)


class Causal(TrainingObjective):
    """Each token predicts the next one."""

    counts_bytes = True

    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        tokens = draw.integers(0, config.vocabulary, (rows, config.sequence_length + 1))
        return Batch.next_token(0, tokens, np.zeros(rows, dtype=np.int64))

    def _losses(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool) -> TargetLosses:
        loss = self._head_loss(model, hidden_BTD.flatten(0, 1), batch.targets_BL.flatten(), scored=scored)
        return loss.total, loss.nats_N.view(batch.targets_BL.shape), None


class Masked(TrainingObjective):
    """Hidden tokens are predicted from both sides; only they go through the head."""

    def loader(self, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader:
        loader = super().loader(recipe, store, rank, world)
        loader.transforms += (masker_of(recipe, store).batch,)
        return loader

    def held_out(self, recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
        masker = masker_of(recipe, store)
        return [masker.held_out(part, store.token_bytes) for part in super().held_out(recipe, store, max_tokens)]

    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        tokens = draw.integers(0, config.vocabulary, (rows, config.sequence_length))
        targets = np.where(draw.random(tokens.shape) < self.train.masking.share, tokens, -1)
        return Batch(0, tokens, targets, np.zeros(rows, dtype=np.int64))

    def _losses(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool) -> TargetLosses:
        targets_BS, predicted_BS = batch.targets_BL, None
        counts_BS = targets_BS >= 0
        hidden_ND = hidden_BTD[counts_BS]
        if scored:
            predicted_BS = torch.full_like(targets_BS, -1)
            chunks = torch.split(hidden_ND, self.train.loss_chunk)
            predicted_BS[counts_BS] = torch.cat([model.head.logits(hidden_CD).argmax(-1) for hidden_CD in chunks])
        loss = self._head_loss(model, hidden_ND, targets_BS[counts_BS], scored=scored)
        nats_BS = loss.nats_N.new_zeros(targets_BS.shape)
        nats_BS[counts_BS] = loss.nats_N
        return loss.total, nats_BS, predicted_BS


@dataclass(frozen=True)
class ClassifyTask(TrainingObjective):
    """Each text predicts its label. is_encoder: a text begins and ends with special tokens, the first one not end-of-text."""

    is_encoder: bool = False

    def prepare(self, model: Transformer) -> None:
        if self.train.is_frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("classifier."))

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        return Documents.padded(self._lengths(inputs_BT), inputs_BT.shape[1])

    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        tokens = draw.integers(0, config.vocabulary, (rows, config.sequence_length))
        targets = draw.integers(0, config.labels, (rows, 1))
        return Batch(0, tokens, targets, np.zeros(rows, dtype=np.int64))

    def _losses(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch, *, scored: bool) -> TargetLosses:
        logits_BL = upcast(model.classifier(hidden_BTD, self._lengths(batch.inputs_BL), batch.masks))
        nats_B = F.cross_entropy(logits_BL, batch.targets_BL[:, 0], reduction="none", ignore_index=-1)
        return nats_B.sum(), nats_B[:, None], logits_BL.argmax(dim=1, keepdim=True)

    def _lengths(self, inputs_BT: Tensor) -> Tensor:
        """Tokens of each text (see `LabelledTexts`): its first always counts, and end-of-text pads it."""
        lengths_B = 1 + (inputs_BT[:, 1:] != self.end_of_text).sum(dim=1)
        return lengths_B + (inputs_BT[:, 0] != self.end_of_text) if self.is_encoder else lengths_B


def masker_of(recipe: Recipe, store: TokenStore) -> Masker:
    """The masker of a run's sequences. Raises InputError when its tokenizer has no mask token."""
    if store.mask_token is None:
        raise InputError(f"{store.folder}: no mask token; write the tokens again, with train.objective = masked")
    config, edges = recipe.train.masking, None
    if config.whole_words:
        tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
        edges = WordEdges.of(tokenizer.token_byte_values())
    return Masker(config, key_of("masks", recipe.run.seed), store.mask_token, store.token_bytes > 0, edges)


@dataclass(frozen=True)
class Masker:
    """Hides tokens: which ones is a pure function of (run seed, sample number).

    The random numbers are Philox's (Salmon et al. 2011), a counter-based generator keyed by seed and sample; only its raw 64-bit
    output is used, which numpy keeps stable. So masks do not depend on the micro-batch, the number of processes or a resume, and
    every epoch hides other tokens.

    Of the n ordinary tokens of a sequence, exactly max(round(share n), 1) are hidden. Devlin et al. (2019,
    section 3.1 and appendix A.1): 80% of them become the mask token, 10% a random token, 10% stay as they are. Whole words
    are hidden in random order as long as they fit into that number, as in BERT's published code; a word that does not fit is
    skipped, and if none fits, the first one is cut.

    key: of the random numbers; ordinary_V: ids that are not special tokens; edges: for whole words.
    """

    settings: Masking
    key: int
    mask_token: int
    ordinary_V: npt.NDArray[np.bool_]
    edges: WordEdges | None = None

    def hide(self, ids_T: Ids, sample: int) -> tuple[Ids, Ids]:
        """Inputs and targets of a sequence; targets of tokens that are not hidden are -1."""
        draws = np.random.Philox(key=np.array([self.key, sample], dtype=np.uint64))
        candidates = np.flatnonzero(self.ordinary_V[ids_T])
        inputs_T, targets_T = ids_T.copy(), np.full_like(ids_T, -1)
        if not len(candidates):
            return inputs_T, targets_T
        count = max(round(self.settings.share * len(candidates)), 1)
        if self.settings.whole_words:
            hidden = self._words(ids_T, candidates, count, draws)
        else:
            hidden = candidates[np.argsort(_uniform(draws, len(candidates)), kind="stable")[:count]]
        targets_T[hidden] = ids_T[hidden]
        inputs_T[hidden] = self._replacements(ids_T[hidden], draws)
        return inputs_T, targets_T

    def _words(self, ids_T: Ids, candidates: Ids, count: int, draws: Any) -> Ids:
        """Positions of whole words, at most `count` tokens in all."""
        assert self.edges is not None, "whole words need the table of their edges"
        firsts = self.edges.starts(ids_T)
        words = np.split(candidates, np.flatnonzero(firsts[candidates])[1:])  # a word begins with a candidate
        order = np.argsort(_uniform(draws, len(words)), kind="stable").tolist()
        chosen: list[Ids] = []
        left = count
        for number in order:
            if len(words[number]) <= left:
                chosen.append(words[number])
                left -= len(words[number])
            if not left:
                break
        return np.concatenate(chosen) if chosen else words[order[0]][:count]

    def _replacements(self, ids_N: Ids, draws: Any) -> Ids:
        """The inputs at hidden tokens."""
        input_N = np.full_like(ids_N, self.mask_token)
        if self.settings.mode == "bert":
            ordinary = np.flatnonzero(self.ordinary_V)
            what, which = _uniform(draws, len(ids_N)), _uniform(draws, len(ids_N))
            random_N = ordinary[(which * len(ordinary)).astype(np.int64)]
            input_N = np.where(what < MASKED, input_N, np.where(what < RANDOM, random_N, ids_N))
        return input_N

    def batch(self, batch: Batch) -> Batch:
        """A batch with hidden tokens; the targets are the tokens that were hidden."""
        inputs, targets = self._hidden(batch.inputs, batch.samples.tolist())
        return replace(batch, inputs=inputs, targets=targets)

    def held_out(self, part: HeldOut, token_bytes: Ids) -> HeldOut:
        """Held-out sequences with masks that are the same at every validation."""
        fixed = replace(self, key=key_of("held-out masks", part.source))
        inputs, targets = fixed._hidden(part.inputs, range(len(part.inputs)))
        hidden_bytes = np.where(targets >= 0, token_bytes[targets], 0).sum(axis=1)
        return HeldOut(part.source, inputs, targets, hidden_bytes, part.starts)

    def _hidden(self, ids_BT: Ids, samples: Iterable[int]) -> tuple[Ids, Ids]:
        inputs, targets = zip(*(self.hide(*pair) for pair in zip(ids_BT, samples, strict=True)), strict=True)
        return np.stack(inputs), np.stack(targets)


def _uniform(draws: Any, count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits of as many raw draws."""
    raw: npt.NDArray[np.uint64] = draws.random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
