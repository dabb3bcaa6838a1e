"""Trained runs for Python: metrics, generated text, losses of texts and training batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bessemer.api import html
from bessemer.checkpoint.selection import find_step
from bessemer.common.errors import InputError, require_import
from bessemer.guard.journal import Journal
from bessemer.recipe import ResolvedRecipe, load_resolved
from bessemer.report import page, summary
from bessemer.report.data import RunReader
from bessemer.run.directory import RunDirectory, Weights, checkpoint_steps
from bessemer.run.files import read_json, read_json_lines
from bessemer.workflow.resume_policy import require_unedited

if TYPE_CHECKING:
    import pyarrow

    from bessemer.tokens.shards import TokenStore
    from bessemer.tokens.tokenizer import Tokenizer
    from bessemer.tokens.trace import StepBatch
    from bessemer.train.trainer import Trainer

KINDS = ("train", "validation", "inside", "ranks", "tasks")


class TokenLoss(NamedTuple):
    """The loss of one token.

    Attributes:
        id: Its id in the vocabulary.
        text: Its text. Bytes that do not form a whole character become replacement characters.
        nats: Its cross-entropy in nats, given all tokens before it.
    """

    id: int
    text: str
    nats: float


@dataclass(frozen=True)
class TextLoss:
    """The loss of a model on a text.

    Attributes:
        nats: Cross-entropy of the whole text in nats.
        num_tokens: Number of tokens in the text.
        num_bytes: Number of UTF-8 bytes in the text.
        bits_per_byte: `nats` in bits divided by `num_bytes`. None if the tokenizer's tokens do not account for all bytes.
        tokens: Loss of each token; empty unless requested.
    """

    nats: float
    num_tokens: int
    num_bytes: int
    bits_per_byte: float | None
    tokens: tuple[TokenLoss, ...] = ()


class TrainingRun:
    """A run directory with its recipe, metrics, model and data.

    Create one with `bessemer.open_run` or `bessemer.train_model`.

    Attributes:
        path: The run directory.
        files: Paths of its files, such as `files.export` for the exported model.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, RunDirectory(path)
        self._reader = RunReader(self.files)
        self._models: dict[int | None, tuple[TokenStore, Trainer, Tokenizer]] = {}

    @cached_property
    def recipe(self) -> ResolvedRecipe:
        """The recipe with every derived value filled in."""
        require_unedited(self.files)
        return load_resolved(self.files.recipe)

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return checkpoint_steps(self.files.checkpoints)

    @property
    def evaluation(self) -> dict[str, Any]:
        """Scores of the newest weights on held-out text and on tasks.

        Raises:
            InputError: The run has not been evaluated.
        """
        return dict(read_json(self.files.evaluation, self.files.command("evaluate")))

    def report(self) -> Path:
        """Write the HTML report of the run and return its path."""
        return page.write(self.files)

    def metrics(self, kind: str = "train") -> pyarrow.Table:
        """Return the metrics of one kind as a table with one row per logged step.

        A step that was trained again after a rollback appears once, with its last values. Call this again to follow a run
        that is still training. `.to_pandas()` converts the table to a data frame.

        Args:
            kind: `train`, `validation`, `inside` (statistics of layers), `ranks` (step times of ranks) or `tasks`.

        Returns:
            A table with the column `step` and one column per metric, null at steps without a value. Metrics by source
                are named `loss_by_source.NAME`; metrics of experts, `max_violation.BLOCK`.

        Raises:
            InputError: There is no such kind.
        """
        if kind not in KINDS:
            raise InputError(f"metrics: unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
        with require_import("metrics need pyarrow; install it with: pip install pyarrow"):
            import pyarrow as pa
        curves = getattr(self._reader.read(is_growing=True), kind)
        groups = {f"{key}.{name}": x for key, group in curves.groups.items() for name, x in group.items()}
        columns = {name: pa.array(x, from_pandas=True) for name, x in {**curves.columns, **groups}.items()}
        return pa.table({"step": pa.array(curves.step.astype("int64")), **columns, **curves.texts})

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents of the run in the order in which they happened, each as the values of its line in incidents.jsonl.

        Each has its `step`, `what`, `cause` and `action`, and most have `advice`.
        """
        return read_json_lines(self.files.incidents)

    def generate(
        self, prompt: str, *, max_tokens: int = 200, temperature: float = 0.8, top_k: int = 50, top_p: float = 1.0,
        seed: int = 0, step: int | None = None,
    ) -> str:  # fmt: skip
        """Return the text that the model generates after a prompt, without the prompt.

        `bessemer generate` does the same.

        Args:
            prompt: The text to continue. Special tokens in it are encoded as special tokens.
            max_tokens: Maximum number of tokens to generate.
            temperature: Divisor of the logits before sampling; 0 always takes the most likely token.
            top_k: Sample from this many most likely tokens; 0: from all.
            top_p: Sample from the most likely tokens whose probabilities add up to this; 1: from all.
            seed: Seed of the sampling.
            step: Step of a checkpoint; None: the newest one.

        Raises:
            InputError: The run has no such checkpoint, its model cannot generate text, or an argument is invalid.
        """
        from bessemer.train.generation import Sampling, complete

        if max_tokens < 1:
            raise InputError(f"max_tokens: {max_tokens} is too small; set at least 1")
        sampling, (store, trainer, tokenizer) = Sampling(temperature, top_k, top_p, seed), self._open(step)
        return complete(trainer.model, tokenizer, prompt, max_tokens, sampling, store.framing, store.ends)

    def loss(self, text: str, *, per_token: bool = False, step: int | None = None) -> TextLoss:
        """Return the loss of the model on a text, read as the beginning of a document, in the training precision.

        A text longer than the model's context length is scored in non-overlapping windows of that length.

        Args:
            text: Text to score. Special tokens spelled out in it are ordinary text.
            per_token: True to also return the loss of each token.
            step: Step of a checkpoint; None: the newest one.

        Raises:
            InputError: The text is empty, the run has no such checkpoint, or its model does not predict the next token.
        """
        import torch

        from bessemer.distributed.context import LocalBatch
        from bessemer.train.generation import require_writer

        store, trainer, tokenizer = self._open(step)
        model, before = trainer.model, list(store.framing.before) or [store.end_of_text]
        require_writer(model.config)
        ids = tokenizer.encode(text)
        if not ids:
            raise InputError("loss: the text is empty; pass at least one character")
        whole = torch.tensor([[*before, *ids]], device=trainer.device.torch_device)
        nats, limit = list[float](), model.config.positions_length
        for batch in map(LocalBatch, torch.split(whole[:, :-1], limit, 1), torch.split(whole[:, 1:], limit, 1)):
            with torch.no_grad(), trainer.autocast():
                nats_BT, _ = trainer.task.score(model, model(batch.inputs_BL), batch)
            nats += nats_BT[0].double().tolist()
        nats, num_bytes, tokens = nats[len(before) - 1 :], len(text.encode()), tuple[TokenLoss, ...]()
        if per_token:
            pieces, rows = tokenizer.token_byte_values(), zip(ids, nats, strict=True)
            tokens = tuple(TokenLoss(one, pieces[one].decode(errors="replace"), value) for one, value in rows)
        total = math.fsum(nats)
        bits_per_byte = total / math.log(2) / num_bytes if store.counts_bytes else None
        return TextLoss(total, len(ids), num_bytes, bits_per_byte, tokens)

    def batch(self, step: int) -> StepBatch:
        """Return the global batch that a training step reads, without the samples that a rollback skipped.

        Args:
            step: Training step, counted from 1.

        Returns:
            Token ids `inputs` and `targets`, int64 of shape (sequences, sequence_length). For each sequence also its
                `sources`, its `documents` (32 hexadecimal digits each) and their `offsets`, the positions at which they
                start.

        Raises:
            InputError: The run has no such step, or no tokens.
        """
        from bessemer.tokens.shards import TokenStore
        from bessemer.tokens.trace import step_batch
        from bessemer.train.task import example_transforms

        transforms = example_transforms(self.recipe, TokenStore.open(self.files.tokens))
        return step_batch(self.path, step, Journal.read(self.files.journal).omitted, transforms)

    def _open(self, step: int | None) -> tuple[TokenStore, Trainer, Tokenizer]:
        """Return the tokens, the trainer with the model of checkpoint `step` (None: the newest), and the tokenizer.

        The last loaded model is cached.
        """
        from bessemer.tokens.tokenizer import Tokenizer
        from bessemer.train.state import load_model

        newest = next(reversed(self.steps), None)
        wanted = newest if step is None else find_step(self.files, step, "step")
        if wanted not in self._models:
            store, restored = load_model(self.recipe, self.files, Weights(step=None if wanted == newest else wanted))
            tokenizer = Tokenizer.load(store.folder / "tokenizer.json", self.recipe.tokenizer.end_of_text)
            self._models = {wanted: (store, restored.trainer, tokenizer)}
        return self._models[wanted]

    def __repr__(self) -> str:
        return f"TrainingRun({str(self.path)!r})"

    def _repr_html_(self) -> str:
        data = self._reader.read(is_growing=True)
        rows = {
            "run": data.name,
            "folder": str(self.path),
            "checkpoints": ", ".join(map(str, self.steps[-5:])) or "none",
            "incidents": str(len(data.incidents)),
        }
        return html.table(summary.headline(data), rows.items())


def open_run(path: str | Path) -> TrainingRun:
    """Open an existing run.

    Args:
        path: The run directory.

    Raises:
        InputError: The folder is not a run directory with a recipe.
    """
    if not (Path(path) / "recipe.toml").is_file():
        raise InputError(f"{path}: not a run directory (no recipe.toml); create one with `bessemer run RECIPE`")
    return TrainingRun(Path(path))
