"""The objectives: causal and masked language modelling, classification. A task defines the batches of a run, the mask of its
attention, its loss, and the scores on held-out text; nothing else depends on the objective.

Shapes: B sequences, T tokens, D width, N tokens that count, C of a chunk, S targets of a sequence: T, or 1 for a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer import hub
from bessemer.errors import InputError
from bessemer.hashing import key_of
from bessemer.model.attention import Documents
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.huggingface.config import model_config, read_config
from bessemer.model.kernels import upcast
from bessemer.model.loss import MicroBatchLoss
from bessemer.model.transformer import Transformer
from bessemer.recipe import Model, Recipe, Train
from bessemer.tokens.gate import Gate
from bessemer.tokens.held_out import HeldOut, held_out_samples
from bessemer.tokens.loader import Batch, Loader, loader_of
from bessemer.tokens.pieces import WordEdges
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.cross_entropy import Loss, chunked_cross_entropy
from bessemer.train.masking import Masker


@dataclass(frozen=True)
class Task:
    """What an objective provides to the step, the loop and the validation. document_mask: attention stays within documents."""

    train: Train
    end_of_text: int
    document_mask: bool = False
    counts_bytes: ClassVar[bool] = False  # whether the targets are the whole text, so that bits per byte are defined

    def prepare(self, model: Transformer) -> None:
        """Freeze the weights that are not trained: here none."""

    def loader(self, recipe: Recipe, store: TokenStore, rank: int = 0, world: int = 1) -> Loader:
        """The training batches of a run."""
        return loader_of(recipe, store, rank, world, (Gate.of(recipe, store).applied,) if recipe.tokens.gate else ())

    def held_out(self, recipe: Recipe, store: TokenStore, max_tokens: int | None = None) -> list[HeldOut]:
        """The sequences that a validation scores."""
        return held_out_samples(recipe, store, max_tokens)

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        """The documents that attention is masked by, from the packing (starts_BT: where pieces begin) or from end-of-text
        tokens; None: sequences only."""
        if not self.document_mask:
            return None
        return (
            Documents.from_tokens(inputs_BT, self.end_of_text)
            if starts_BT is None
            else Documents.from_starts(starts_BT)
        )

    def loss(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor,
        masks: DropoutMasks | None = None,
    ) -> MicroBatchLoss:  # fmt: skip
        """Cross-entropy over the targets that count (>= 0), with the recipe's z-loss and label smoothing."""
        total, nats_BS, predicted_BS = self._losses(model, hidden_BTD, inputs_BT, targets_BS, masks, scored=False)
        correct_B = None if predicted_BS is None else (predicted_BS == targets_BS)[:, 0]
        return MicroBatchLoss(total, nats_BS.detach().sum(dim=1), correct_B)

    def score(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Nats of each target without z-loss and label smoothing, and the likeliest prediction where scored; both (B, S)."""
        _, nats_BS, predicted_BS = self._losses(model, hidden_BTD, inputs_BT, targets_BS, None, scored=True)
        return nats_BS, predicted_BS

    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        """A batch of random tokens with a typical number of targets, to time a step."""
        raise NotImplementedError

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor, masks: DropoutMasks | None,
        *, scored: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """The differentiable total; nats and predictions by target, (B, S). scored: without z-loss and label smoothing."""
        raise NotImplementedError

    def _head_loss(self, model: Transformer, hidden_ND: Tensor, targets_N: Tensor, *, scored: bool) -> Loss:
        """Cross-entropy of the model's predictions over its vocabulary."""
        head, train = model.head, self.train
        return chunked_cross_entropy(
            head.transform(hidden_ND), head.weight, targets_N, bias_V=head.bias, chunk=train.loss_chunk,
            is_cuda=True if train.device == "cuda" else None, z_loss=0.0 if scored else train.z_loss,
            label_smoothing=0.0 if scored else train.label_smoothing, soft_cap=head.soft_cap or None,
            vocabulary=head.vocabulary,
        )  # fmt: skip


def task_of(train: Train, document_mask: bool, config: ModelConfig, end_of_text: int) -> Task:
    """The task of an objective. Raises InputError when the model does not fit the objective."""
    objective = train.objective
    if objective == "classify":
        return ClassifyTask(train, end_of_text, is_encoder=not config.causal)
    if config.causal != (objective == "causal"):
        kind, other = ("a decoder", "an encoder") if config.causal else ("an encoder", "a decoder")
        remedy = "train.objective = " + ("causal" if config.causal else "masked")
        raise InputError(
            f"train.objective: {objective} needs {other}, but the model is {kind}; set {remedy}, or take another model"
        )
    return (Masked if objective == "masked" else Causal)(train, end_of_text, document_mask)


def config_of(recipe: Recipe, vocabulary: int, labels: int) -> ModelConfig:
    """The model that a resolved recipe trains. labels: classes of its corpus."""
    if recipe.train.objective != "classify":
        return model_config(recipe, vocabulary)
    config = model_config(recipe, vocabulary, labels=labels)
    pooling = recipe.train.classify.pooling or _source_pooling(recipe.model)
    return config if pooling is None else config.with_changes(pooling=pooling)


def _source_pooling(model: Model) -> Literal["first", "last", "mean"] | None:
    """What the head of the classifier reads that the weights come from; None where they come from no classifier."""
    if model.from_ is None:
        return None
    source = read_config(hub.local_folder(model.from_, weights=False))[1]
    return source.pooling if source.labels else None


class Causal(Task):
    """Each token predicts the next one."""

    counts_bytes = True

    def made_up(self, draw: np.random.Generator, rows: int, config: ModelConfig) -> Batch:
        tokens = draw.integers(0, config.vocabulary, (rows, config.sequence_length + 1))
        return Batch.next_token(0, tokens, np.zeros(rows, dtype=np.int64))

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor, masks: DropoutMasks | None,
        *, scored: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        loss = self._head_loss(model, hidden_BTD.flatten(0, 1), targets_BS.flatten(), scored=scored)
        return loss.total, loss.nats_N.view(targets_BS.shape), None


class Masked(Task):
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

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor, masks: DropoutMasks | None,
        *, scored: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        counts_BS, predicted_BS = targets_BS >= 0, None
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
class ClassifyTask(Task):
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

    def _losses(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor, masks: DropoutMasks | None,
        *, scored: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        logits_BL = upcast(model.classifier(hidden_BTD, self._lengths(inputs_BT), masks))
        nats_B = F.cross_entropy(logits_BL, targets_BS[:, 0], reduction="none", ignore_index=-1)
        return nats_B.sum(), nats_B[:, None], logits_BL.argmax(dim=1, keepdim=True)

    def _lengths(self, inputs_BT: Tensor) -> Tensor:
        """Tokens of each text (see `LabelledTexts`): its first always counts, and end-of-text pads it."""
        lengths_B = 1 + (inputs_BT[:, 1:] != self.end_of_text).sum(dim=1)
        return lengths_B + (inputs_BT[:, 0] != self.end_of_text) if self.is_encoder else lengths_B


def masker_of(recipe: Recipe, store: TokenStore) -> Masker:
    """The masker of a run's sequences. Raises InputError when its tokenizer has no mask token."""
    if store.mask_token is None:
        raise InputError(
            f"{store.folder}: its tokenizer has no mask token; write the tokens again, with train.objective = masked"
        )
    config, edges = recipe.train.masking, None
    if config.whole_words:
        tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
        edges = WordEdges.of(tokenizer.token_pieces())
    return Masker(config, key_of("masks", recipe.run.seed), store.mask_token, store.token_bytes > 0, edges)
