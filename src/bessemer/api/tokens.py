"""Token datasets for Python: write, open and iterate the tokens of a run, for training here or in other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import tomli_w

from bessemer.api import exports, html
from bessemer.api.keys import make_recipe, run_table
from bessemer.common.console import amount
from bessemer.common.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import link_or_copy
from bessemer.run.stage import staging
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import SPLITS
from bessemer.tokens.shards.store import TokenDocument
from bessemer.workflow import derive, stages
from bessemer.workflow.session import Session

if TYPE_CHECKING:
    import datasets


class TokenDataset:
    """A dataset of documents as token ids, encoded when tokens are first needed.

    Create one with `TextDataset.tokenize` or `bessemer.open_tokens`.

    Attributes:
        tables: Tables of the recipe that the tokens are made from; empty for opened tokens.
        path: Run directory that holds the tokens; None before `write`.
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        path: Path | None = None,
        lend: Callable[[RunDirectory], None] = lambda run: None,
    ) -> None:
        """Create a dataset.

        Args:
            tables: Tables of the recipe that makes the tokens; empty for tokens that exist.
            path: Run directory that holds the tokens; None if they are not written yet.
            lend: Function that hard-links documents that were built elsewhere into the run directory it is called with.
        """
        self.tables, self.path, self._lend_documents = dict(tables), path, lend

    def recipe(self, path: Path) -> Recipe:
        """Return the recipe that writes these tokens in the run directory `path`.

        Raises:
            InputError: A key is invalid.
        """
        return make_recipe({**run_table(path), **self.tables})

    def write(self, path: str | Path) -> TokenDataset:
        """Write documents and tokens in a run directory, as its `corpus/` and `tokens/`, unless they are already there.

        Args:
            path: The run directory. A training in it, or `bessemer.train_model(tokens=...)`, reads them.

        Returns:
            A dataset that reads the written tokens.

        Raises:
            InputError: The text is too small for the vocabulary, or the documents or the tokenizer cannot be used.
        """
        run = RunDirectory(Path(path))
        session = Session(self.recipe(run.path), run)
        with run.lock():
            self._lend_documents(run)
            stages.corpus(session)
            stages.tokens(session, derive.with_held_out)
        return TokenDataset(self.tables, run.path, self._lend_documents)

    def lend(self, run: RunDirectory) -> None:
        """Hard-link this dataset's corpus and tokens into the run directory `run`, unless it already has a corpus or tokens.

        Raises:
            InputError: The run already has other tokens.
        """
        theirs = RunDirectory(self.store.folder.parent)
        for source, target in ((theirs.corpus, run.corpus), (theirs.tokens, run.tokens)):
            link_stage(source, target)
        if TokenStore.open(run.tokens).digest != self.store.digest:
            raise InputError(f"{run.path}: this run has other tokens; set another run.name")

    @cached_property
    def store(self) -> TokenStore:
        """The token shards with their manifest. Tokens not yet written go to a temporary folder that is removed at exit."""
        if self.path is not None:
            return TokenStore.open(RunDirectory(self.path).tokens)
        self._scratch = TemporaryDirectory(prefix="bessemer-")
        return self.write(Path(self._scratch.name) / "tokens").store

    def num_tokens(self, split: str = "train") -> int:
        """Return the number of tokens in a split.

        Args:
            split: `train` or `heldout`.
        """
        return self.store.num_tokens(_checked(split))

    def documents(self, split: str = "train", *sources: str) -> Iterator[TokenDocument]:
        """Iterate over the documents of a split.

        Args:
            split: `train` or `heldout`.
            sources: Names of the sources to read; all by default.

        Returns:
            Documents with `identity` (32 hexadecimal digits), `source`, `ids` (an array that ends with end-of-text) and
                `label`.

        Raises:
            InputError: There is no such split or source.
        """
        if unknown := [name for name in sources if name not in self.store.sources]:
            raise InputError(f"documents: unknown source {unknown[0]!r}; choose from {', '.join(self.store.sources)}")
        return self.store.documents(_checked(split), *sources)

    def __iter__(self) -> Iterator[TokenDocument]:
        return self.documents()

    def sequences(self, length: int, split: str = "train") -> exports.TokenSequences:
        """Return the concatenated documents, cut into sequences, as a map-style dataset for a torch DataLoader.

        Args:
            length: Sequence length in tokens.
            split: `train` or `heldout`.

        Returns:
            A dataset whose items are dicts of int64 arrays of shape (length,): `input_ids`, and `targets`, the token after
                each.

        Raises:
            InputError: There is no such split, or no source has enough tokens for one sequence.
        """
        return exports.TokenSequences(self.store, length, _checked(split))

    def to_datasets(self, split: str = "train") -> datasets.IterableDataset:
        """Return the documents as a Hugging Face `IterableDataset`.

        It is also an `IterableDataset` of torch. The workers of a DataLoader divide the shards among themselves.

        Args:
            split: `train` or `heldout`.

        Returns:
            A dataset whose rows have the keys `identity`, `source` and `input_ids`.

        Raises:
            InputError: There is no such split.
        """
        return exports.datasets_of_tokens(self.store, _checked(split))

    def __repr__(self) -> str:
        return f"<tokens{f' in {self.path}' if self.path else ', not written yet'}>"

    def _repr_html_(self) -> str:
        if self.path is None and "store" not in self.__dict__:
            rows = ([name, tomli_w.dumps(keys)] for name, keys in self.tables.items())
            return html.table("Tokens, not written yet", rows)
        store = self.store
        rows = ([name, *(amount(store.split(name, split).num_tokens) for split in SPLITS)] for name in store.sources)
        return html.table(f"Tokens of {store.vocabulary:,} ids", rows, ("source", "to train on", "held out"))


def open_tokens(path: str | Path) -> TokenDataset:
    """Open the tokens of a run directory.

    Args:
        path: The run directory.

    Raises:
        InputError: The run has no tokens.
    """
    tokens = TokenDataset({}, Path(path))
    _ = tokens.store
    return tokens


def _checked(split: str) -> str:
    if split not in SPLITS:
        raise InputError(f"split: unknown split {split!r}; choose {' or '.join(SPLITS)}")
    return split


def link_stage(source: Path, target: Path) -> None:
    """Hard-link the files of a stage of another run, such as its corpus, from the folder `source` to `target`.

    Does nothing if `source` does not exist or `target` does.
    """
    if source.exists() and not target.exists():
        with staging(target) as staged:
            link_or_copy(source.resolve(), staged)
