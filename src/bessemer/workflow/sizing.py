"""Rules that derive recipe values from the size of the text and the speed of the machine. Pure arithmetic.

- Minutes: 2 for 50 kB of text and 4 more per power of ten, at most 20, so that a first model takes no longer than a coffee
  break.
- Held out: sqrt(bytes x 10 kB), at most a tenth of the text: 5 kB of 50 kB, 141 kB of 2 MB, 1 MB of 100 MB. The error of a
  score falls with the square root of the held-out bytes, and held-out text is missing from the training. With fewer than 8
  whole held-out documents, the score would depend on their subjects, so a passage of each document is held out instead.
- Depth: the blocks' parameters N follow from the FLOPs C of the minutes with 4 tokens per block parameter, C = 6 x 4 N^2. In
  about equal minutes on 17 MB of code, 0.85, 1.1, 2.0 and 2.6 million block parameters, with 7.2, 6.1, 2.6 and 1.5 tokens each,
  reached 1.480, 1.311, 1.288 and 1.313 bits per byte. At most 4 parameters per token of the text, and at least 2 blocks.
- Vocabulary: 1,024 for 2 MB of text, in proportion to its cube root. A token should occur often enough to be learned, and the
  best vocabulary grows more slowly than the text (Tao et al. 2024). At most 32 ids per unit of width, so that embeddings do
  not dominate a small model, and at most the number that the text supports.
- Sequence length: 256 tokens, 512 from depth 6, 1,024 from depth 9; at least 32 sequences in the text.
- Epochs: at most 20 if no horizon is given. Up to 4 epochs are nearly as good as new text, and little is gained after 16 to
  40 (Muennighoff et al. 2023, section 6).
- Weight decay: 0.1, or 0.15 per epoch up to 1, also on the embeddings, because the model overfits text that is read often
  (Kim et al. 2025 find the best decay up to 30 times the usual one when text is repeated).
- Batch: the depth dial's rule. If time is the limit, at most a 400th of the run's tokens, because small batches waste the
  machine: in 3 minutes on 750 MB of code, 512, 2,048 and 4,096 tokens per step reached 2.588, 2.412 and 2.377 bits per byte
  in 1,832, 766 and 373 steps. If the text is the limit, at most a 4,000th, because more updates then cost nothing: 20 epochs
  of 50 kB of prose reached 2.366 with 512 tokens per step and 3.058 with 1,024.
- Optimizer: Muon for the hidden matrices, and AdamW with a faster embedding for the rest, unless the recipe names
  another one.
- Schedule: wsd, half of it decay. Its stable phase does not depend on the number of steps, so the run can be extended.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from bessemer.common.console import counted, size
from bessemer.recipe import Recipe
from bessemer.recipe.uses import NamedRule

MIN_MINUTES, MAX_MINUTES, MINUTES_PER_DECADE, MINUTES_FROM_BYTES = 2.0, 20.0, 4.0, 50_000
HELD_OUT_BYTES, HELD_OUT_LIMIT, MIN_HELD_OUT_DOCUMENTS = 10_000, 0.1, 8
TOKENS_PER_BLOCK_PARAMETER, PARAMETERS_PER_TOKEN = 4, 4.0
MIN_DEPTH, MAX_DEPTH, BLOCK_PARAMETERS = 2, 64, 49_152  # parameters at depth 1: 12 x width^2, width = 64 x depth
MIN_VOCABULARY, MAX_VOCABULARY, IDS_PER_WIDTH = 320, 65_536, 32
LENGTHS = ((9, 1024), (6, 512), (0, 256))  # (minimum depth, sequence length)
MIN_LENGTH, MIN_SEQUENCES = 16, 32
# At 20 epochs of 50 kB, a decay of 0.8, 1.5 and 2.8 reached 2.385, 2.434 and 2.534 bits per byte of prose (a 5-gram 2.461),
# and 1.809, 1.758 and 1.957 of code (1.854).
MAX_EPOCHS, DECAY_PER_EPOCH, DECAY, MAX_DECAY = 20.0, 0.15, 0.1, 1.0
UPDATES_OF_TIME, UPDATES, MIN_BATCH_TOKENS = 400, 4000, 512
# From benchmarks/results/ablations.json, as is the decay: 3.7, 13 and 20 epochs of 3, 1 and 0.3 MB of prose reached 1.768, 1.901
# and 2.283 bits per byte with Muon and a decay of 0.22, 1 and 1, and 1.828, 2.000 and 2.585 with AdamW and 0.56, 1 and 1.
MUON_DECAY_PER_EPOCH = 0.075
MUON = {"kind": "muon", "embedding_rate": 8.0, "betas": (0.8, 0.95), "muon_momentum": 0.9}
SCHEDULE = {"kind": "wsd", "decay_share": 0.5, "final_share": 0.0}
STEPS_SHARE = 0.92  # approximate share of train.minutes spent in steps; the rest is validation and saving


@dataclass(frozen=True)
class Basis:
    """The measurements that recipe values are derived from.

    Attributes:
        text_bytes: Bytes of clean text.
        documents: Number of clean documents.
        device: Name of the device; empty if no value depends on it.
        flops_per_second: FLOP/s that a training step reaches on the device; 0 if no value depends on it.
        share: Held-out share of whole documents that gives about the desired held-out bytes.
        held_documents: Number of documents in that held-out split.
        held_bytes: Bytes of that held-out split; 0 if unknown.
        width: Width of the model that the training starts from; 0 without one.
        positions: Context length of the model that the training starts from; 0 without one.
        ids: Largest vocabulary that the text supports; 0 if it supports the derived one.
    """

    text_bytes: int
    documents: int
    device: str = ""
    flops_per_second: float = 0.0
    share: float = 0.01
    held_documents: int = MIN_HELD_OUT_DOCUMENTS
    held_bytes: int = 0
    width: int = 0
    positions: int = 0
    ids: int = 0


@dataclass(frozen=True)
class Choice:
    """Derived keys of one table of the recipe, with their values and the reason."""

    table: str
    values: dict[str, object]
    why: str

    def __str__(self) -> str:
        shown = (f"{self.table}.{key} = {_shown(value)}" for key, value in self.values.items())
        return f"{', '.join(shown)}: {self.why}"


def held_out_bytes(text_bytes: int) -> int:
    """Return the number of bytes to hold out of `text_bytes`: sqrt(10,000 x text_bytes), at most a tenth of the text."""
    return max(min(round(math.sqrt(text_bytes * HELD_OUT_BYTES)), int(text_bytes * HELD_OUT_LIMIT)), 1)


def default_minutes(text_bytes: int) -> float:
    """Return the default training time in minutes: 2 for up to 50 kB of text, 4 more per factor of 10, at most 20."""
    grown = MIN_MINUTES + MINUTES_PER_DECADE * math.log10(max(text_bytes, 1) / MINUTES_FROM_BYTES)
    return round(min(max(grown, MIN_MINUTES), MAX_MINUTES), 1)


def bytes_per_token(vocabulary: int) -> float:
    """Estimate the bytes of text per BPE token as 1 + 0.65 log2(vocabulary / 256), at most 4.4."""
    return min(1.0 + 0.65 * math.log2(max(vocabulary, 257) / 256), 4.4)


def needs_speed(recipe: Recipe) -> bool:
    """Return True if the recipe trains for a number of minutes and has no model size, which then follows from the speed."""
    train = recipe.train
    return not recipe.model.has_size and train.steps is None and (train.minutes is not None or not train.has_horizon)


def derive(recipe: Recipe, basis: Basis) -> tuple[Recipe, list[Choice]]:
    """Fill in the recipe values that follow from the text and the machine.

    Keys that the recipe sets are kept, and the other values follow from them too. Keys that the depth dial
    (model/recipe_defaults.py) derives stay unset, so apply it afterwards.

    Returns:
        The recipe with the derived values, and the choices with their reasons.
    """
    return _Derivation(recipe, basis).made()


class _Derivation:
    def __init__(self, recipe: Recipe, basis: Basis) -> None:
        self.recipe, self.basis, self.choices = recipe, basis, list[Choice]()
        self.text = f"{size(basis.text_bytes)} of text"

    def made(self) -> tuple[Recipe, list[Choice]]:
        has_size = self.recipe.model.has_size
        if self.basis.text_bytes and self.recipe.corpus.sources:
            self._held_out()
        if not has_size:
            if not self.recipe.train.has_horizon:
                self._set("train", f"for {self.text}", minutes=default_minutes(self.basis.text_bytes))
            self._size()
        self._vocabulary()
        self._length()
        self._epochs()
        if not has_size:
            self._updates()
        return self.recipe, self.choices

    def _set(self, table: str, why: str, **values: object) -> None:
        """Set keys of a table of the recipe, and record the choice with its reason `why`."""
        outer, _, inner = table.partition(".")
        self.choices.append(Choice(table, values, why))
        self.recipe = self.recipe.changed(**{outer: {inner: values} if inner else values})

    def _complete(self, table: str, given: NamedRule, why: str, **values: object) -> bool:
        """Set the keys of a table that the recipe leaves out, and return True; unless the recipe gives it another kind."""
        if "kind" in given.model_fields_set and given.kind != values["kind"]:
            return False
        if missing := {key: value for key, value in values.items() if key not in given.model_fields_set}:
            self._set(table, why, **missing)
        return True

    def _held_out(self) -> None:
        tokens, basis = self.recipe.tokens, self.basis
        if tokens.model_fields_set & {"held_out", "held_out_from"}:
            return
        wanted = held_out_bytes(basis.text_bytes)
        is_known = basis.held_bytes > 0  # False before the corpus is built
        few = (basis.held_documents if is_known else basis.documents) < MIN_HELD_OUT_DOCUMENTS
        few = few or basis.held_bytes > 2 * wanted
        if few and self.recipe.chat_parts:  # conversations are held out whole
            why = f"a tenth of {counted(basis.documents, 'conversation')}"
            self._set("tokens", why, held_out=0.1)
        elif few and self.recipe.train.objective != "classify":
            share = round(wanted / basis.text_bytes, 4)
            why = f"about {size(wanted)}, a passage of each: {counted(basis.documents, 'document')} can spare too few whole ones"
            self._set("tokens", why, held_out=share, held_out_from="passages")
        elif not is_known:
            self._set("tokens", f"about {size(wanted)}", held_out=round(wanted / basis.text_bytes, 4))
        else:
            why = f"{size(basis.held_bytes)}, {basis.held_documents:,} of {counted(basis.documents, 'document')}"
            self._set("tokens", why, held_out=min(basis.share, 0.5))

    @property
    def _unique(self) -> float:
        """Approximate number of training tokens in one epoch of the text."""
        vocabulary = self.recipe.tokenizer.vocabulary or self._vocabulary_of(self.recipe.model.depth or MAX_DEPTH)
        learnt = self.basis.text_bytes - held_out_bytes(self.basis.text_bytes)
        return max(learnt, 0) / bytes_per_token(vocabulary)

    @property
    def _flops(self) -> float | None:
        """FLOPs available in `train.minutes`; None if the recipe sets steps or tokens."""
        train = self.recipe.train
        if train.minutes is None or train.steps is not None:
            return None
        return train.minutes * 60 * STEPS_SHARE * self.basis.flops_per_second

    def _size(self) -> None:
        train, unique = self.recipe.train, self._unique
        if (flops := self._flops) is not None:
            blocks = math.sqrt(flops / (6 * TOKENS_PER_BLOCK_PARAMETER))
            why = f"train.minutes = {train.minutes:g} is too little for a larger one"
        else:
            tokens = int(self._tokens)
            blocks = tokens / TOKENS_PER_BLOCK_PARAMETER
            why = f"{tokens:,} tokens are too few for a larger one"
        if blocks > PARAMETERS_PER_TOKEN * unique:
            blocks = PARAMETERS_PER_TOKEN * unique
            why = f"a larger one would learn {self.text} by heart"
        depth = round(math.cbrt(blocks / BLOCK_PARAMETERS))
        if depth < MIN_DEPTH:
            why = "the smallest that learns"
        self._set("model", why, depth=min(max(depth, MIN_DEPTH), MAX_DEPTH))

    def _vocabulary_of(self, depth: int) -> int:
        ids = 1024 * math.cbrt(self.basis.text_bytes / 2**21)
        ids = min(ids, IDS_PER_WIDTH * 64 * depth, MAX_VOCABULARY)
        return max(round(ids / 64) * 64, MIN_VOCABULARY)

    def _vocabulary(self) -> None:
        recipe = self.recipe
        if recipe.tokenizer.path is None and recipe.tokenizer.vocabulary is None and self.basis.text_bytes:
            ids = self._vocabulary_of(self._depth) + len(recipe.tokenizer.special_tokens)
            why = f"for {self.text} and a width of {64 * self._depth}"
            if 0 < self.basis.ids < ids:
                ids, why = self.basis.ids, "the text supports no more"
            self._set("tokenizer", why, vocabulary=ids)

    @property
    def _depth(self) -> int:
        """The model's depth; for a model given by its width, the depth at which the depth dial has that width."""
        model = self.recipe.model
        return max((model.width or self.basis.width) // 64 or model.depth or model.layers or MAX_DEPTH, 1)

    def _length(self) -> None:
        tokens, train = self.recipe.tokens, self.recipe.train
        if "sequence_length" in tokens.model_fields_set or train.global_batch_tokens is not None:
            return
        length = next(length for depth, length in LENGTHS if self._depth >= depth)
        most = max(int(self._unique) // MIN_SEQUENCES, MIN_LENGTH)
        length = min(length, 1 << int(math.log2(most)), self.basis.positions or length)
        depth = self.recipe.model.depth
        width = self.recipe.model.width or self.basis.width or 64 * self._depth
        why = f"for a width of {width}" if depth is None else f"for a depth of {depth}"
        self._set("tokens", why, sequence_length=length)

    def _epochs(self) -> None:
        train = self.recipe.train  # minutes set by the user are used in full, so they limit no epochs
        is_time_derived = train.minutes is None or any("minutes" in choice.values for choice in self.choices)
        if train.steps is None and train.tokens is None and train.max_epochs is None and is_time_derived:
            self._set("train", "repeated more often, text teaches little", max_epochs=MAX_EPOCHS)

    @property
    def _tokens(self) -> float:
        """Approximate number of tokens that the run reads."""
        train = self.recipe.train
        if (flops := self._flops) is None:
            return float(train.tokens or (train.steps or 1) * (train.global_batch_tokens or MIN_BATCH_TOKENS))
        width, vocabulary = 64 * self._depth, self.recipe.tokenizer.vocabulary or 2 * IDS_PER_WIDTH * self._depth
        parameters = BLOCK_PARAMETERS * self._depth**3 + vocabulary * width
        tokens = flops / (6 * parameters)
        return min(tokens, self._unique * train.max_epochs) if train.max_epochs else tokens

    def _updates(self) -> None:
        train, tokens = self.recipe.train, self._tokens
        length = self.recipe.tokens.sequence_length
        if train.global_batch_tokens is None:
            flops = 6 * BLOCK_PARAMETERS * self._depth**3 * tokens
            is_timed = self._flops is not None and tokens < self._unique * (train.max_epochs or math.inf)
            most = min(tokens / (UPDATES_OF_TIME if is_timed else UPDATES), 0.2920 * flops**0.3271)
            batch = length << max(math.floor(math.log2(max(most, MIN_BATCH_TOKENS) / length)), 0)
            self._set("train", f"about {tokens / batch:,.0f} updates", global_batch_tokens=batch)
        epochs, keys = tokens / max(self._unique, 1), train.optimizer.model_fields_set
        is_muon = self._complete("train.optimizer", train.optimizer, "lower loss than AdamW in equal steps", **MUON)
        if epochs > 1.5 and "weight_decay" not in keys:
            per_epoch = MUON_DECAY_PER_EPOCH if is_muon else DECAY_PER_EPOCH
            decay = round(max(min(per_epoch * epochs, MAX_DECAY), DECAY), 2)
            embeddings = {} if "decay_embeddings" in keys else {"decay_embeddings": True}
            why = f"the text is read about {epochs:.3g} times"
            self._set("train.optimizer", why, weight_decay=decay, **embeddings)
        self._complete("train.schedule", train.schedule, "it fits any number of steps", **SCHEDULE)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
