"""Real text with real labels, on every machine: Python's standard library, and which package a snippet comes from.

The text goes through the real corpus and tokens stages into a temporary folder. Files are held out whole, so no snippet
that is scored comes from a file that was trained on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.corpus import pipeline
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.studies.base import build, fit
from bessemer.studies.text import study_recipe
from bessemer.terminal import progress
from bessemer.tokens import build as tokens_build
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train.trainer import Trainer

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")  # of a dozen files or more each

# What no study changes.
RECIPE = """
corpus.dedup.minhash = false
tokenizer.sample_bytes = 2_000_000
tokens = { held_out = 0.2, pack_short_documents = true }
train.device = "cpu"
train.schedule = { kind = "wsd", decay_share = 0.5, final_share = 0.0 }
"""


@dataclass(frozen=True)
class ClassifierStudy:
    """Sizes of a study: the model, the text, the pretraining and the classifiers."""

    layers: int = 3
    width: int = 96
    heads: int = 3
    length: int = 128
    vocabulary: int = 1024
    max_bytes: int = 6_000_000
    steps: int = 1800
    sequences: int = 8
    rate: float = 0.003
    snippet: int = 64
    train_snippets: int = 200  # of each package
    test_snippets: int = 100
    class_steps: int = 150
    class_batch: int = 32
    class_rate: float = 0.002
    head_rate: float = 0.02  # where only the head is trained
    seed: int = 1

    def recipe(self, objective: str, family: str, folder: Path = Path("."), frozen: bool = False) -> Recipe:
        """The recipe of one training of the study, resolved."""
        if objective == "classify":
            length, steps, sequences, rate = self.snippet, self.class_steps, self.class_batch, self.class_rate
        else:
            length, steps, sequences, rate = self.length, self.steps, self.sequences, self.rate
        values = {
            "run.dir": folder, "run.seed": self.seed, "tokenizer.vocabulary": self.vocabulary, "tokens.sequence_length": length,
            "model.family": family, "model.layers": self.layers, "model.width": self.width, "model.heads": self.heads,
            "train.objective": objective, "train.steps": steps, "train.global_batch_tokens": sequences * length,
            "train.micro_batch": sequences, "train.optimizer.learning_rate": self.head_rate if frozen else rate,
            "train.classify.frozen": frozen, "run.name": "library",
        }  # fmt: skip
        return study_recipe("study", values, RECIPE + self._sources(), self.vocabulary)

    def config(self, vocabulary: int, causal: bool, labels: int = 0) -> ModelConfig:
        """The model: one block for both kinds, Qwen3's, which differ in which side attention sees and in nothing else.

        A classifier reads the mean over the text, so that no kind has a place made for it.
        """
        config = model_config(self.recipe("causal", "qwen3"), vocabulary).with_changes(causal=causal)
        if not labels:
            return config
        return config.with_changes(labels=labels, pooling="mean", sequence_length=self.snippet)

    def _sources(self) -> str:
        rest = f'label = "rest"\npaths = ["python://stdlib/*.py"]\nmax_bytes = {self.max_bytes}'
        tables = {name: f'label = "{name}"\npaths = ["python://stdlib/{name}"]' for name in PACKAGES} | {"rest": rest}
        shape = '[[corpus.sources]]\nname = "{}"\nformat = "code"\nsuffixes = [".py"]\n{}\n'
        return "\n".join(shape.format(name, table) for name, table in tables.items())


def tokens_of(settings: ClassifierStudy, folder: Path) -> TokenStore:
    """Clean the library's text and write it as tokens, with a mask token, into `folder`."""
    recipe = settings.recipe("masked", "modernbert", folder)
    run = RunFolder(recipe.run.folder)
    run.path.mkdir(parents=True)
    pipeline.build(recipe, run)
    tokens_build.build(recipe, run)
    return TokenStore.open(run.tokens)


def pretrained(settings: ClassifierStudy, store: TokenStore, objective: str, family: str) -> Trainer:
    recipe = settings.recipe(objective, family)
    trainer = build(recipe, settings.config(store.vocabulary, causal=objective == "causal"), store.end_of_text)
    loader, one_source = trainer.task.loader(recipe, store), np.zeros(settings.sequences, dtype=np.int64)

    def read(step: int) -> Batch:
        return replace(loader.batch(step * settings.sequences, settings.sequences), source=one_source)

    with progress(f"pretraining, {objective}", settings.steps, "steps") as advance:
        fit(trainer, read, advance=advance)
    return trainer


def classifier(
    settings: ClassifierStudy, store: TokenStore, body: Trainer | None, family: str, causal: bool, frozen: bool
) -> Trainer:
    """A classifier of packages, not trained yet, with the weights of a pretrained model where there is one."""
    config = settings.config(store.vocabulary, causal=causal, labels=len(PACKAGES))
    trainer = build(settings.recipe("classify", family, frozen=frozen), config, store.end_of_text)
    weights = dict(body.model.named_parameters()) if body is not None else {}
    for name, parameter in trainer.model.named_parameters():
        if name in weights and not name.startswith(("head.", "classifier.")):
            parameter.data.copy_(weights[name].data)
    return trainer


def train_classifier(settings: ClassifierStudy, trainer: Trainer, train: Snippets, what: str) -> float:
    """Train it; the mean loss of the last tenth of the steps."""
    with progress(what, settings.class_steps, "steps") as advance:
        return float(fit(trainer, train.reader(settings.class_batch, settings.seed), advance=advance)["loss"])


@dataclass(frozen=True)
class Snippets:
    """Pieces from the middle of files: tokens (snippets, length), the first an end-of-text token; label (snippets,)."""

    tokens: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]

    @classmethod
    def of(cls, store: TokenStore, split: str, length: int, each: int, seed: int) -> Snippets:
        """`each` snippets of every package, at random places of random files (of the larger ones more)."""
        tokens = np.full((len(PACKAGES) * each, length), store.end_of_text, dtype=np.int64)
        for number, name in enumerate(PACKAGES):
            stream = store.split(name, split)
            file_starts, sizes = stream.document_spans()
            draw = np.random.default_rng([seed, zlib.crc32(f"{name} {split}".encode())])
            room = np.maximum(sizes - 1 - (length - 1) + 1, 0)  # places in each file where a whole snippet begins
            places = draw.choice(int(room.sum()), each, replace=int(room.sum()) < each)
            files = np.searchsorted(np.cumsum(room), places, side="right")
            starts = file_starts[files] + places - (np.cumsum(room) - room)[files]
            for row, start in enumerate(starts.tolist()):
                stream.read(start, tokens[number * each + row, 1:])
        return cls(tokens, np.repeat(np.arange(len(PACKAGES)), each))

    def reader(self, count: int, seed: int) -> Callable[[int], Batch]:
        """Batches of `count` snippets, every epoch shuffled anew."""

        def read(number: int) -> Batch:
            slots = np.arange(number * count, (number + 1) * count)
            epochs = slots // len(self.tokens)
            rows = np.empty(count, dtype=np.int64)
            for epoch in np.unique(epochs):
                order = np.random.default_rng([seed, int(epoch)]).permutation(len(self.tokens))
                rows[epochs == epoch] = order[slots[epochs == epoch] % len(self.tokens)]
            return Batch(int(slots[0]), self.tokens[rows], self.label[rows][:, None], np.zeros(count, dtype=np.int64))

        return read

    def held_out(self) -> HeldOut:
        return HeldOut("library", self.tokens, self.label[:, None], np.zeros(len(self.tokens), dtype=np.int64))
