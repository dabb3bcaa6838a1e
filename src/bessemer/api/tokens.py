"""Tokens from Python: write, open and iterate, for trainings here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import tomli_w

from bessemer.api import exports, html
from bessemer.api.keys import make_recipe, of_run
from bessemer.common.console import amount
from bessemer.common.errors import InputError, TooFewIds
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import link_or_copy
from bessemer.run.stage import staging
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import SPLITS
from bessemer.tokens.shards.store import TokenDocument
from bessemer.workflow import stages
from bessemer.workflow.session import Session

if TYPE_CHECKING:
    import datasets

SHOWN = 5  # documents in a notebook


class TokenDataset:
    """Documents as token ids. Made by `TextDataset.tokenize` and `bessemer.open_tokens`.

    Nothing is encoded until tokens are needed.

    Attributes:
        tables: Tables of the recipe that say what the tokens are made of; empty for those that were opened.
        path: The run directory that has them; None before they are written.
    """

    def __init__(
        self, tables: Mapping[str, Any], path: Path | None = None, lend: Callable[[RunDirectory], None] | None = None
    ) -> None:
        """lend: links documents that are built already into a run."""
        self.tables, self.path, self._lend_documents = dict(tables), path, lend

    def recipe(self, path: Path) -> Recipe:
        """Return the recipe of these tokens for a run directory. Raises InputError for a wrong key."""
        return make_recipe({**of_run(path), **self.tables})

    def write(self, path: str | Path) -> TokenDataset:
        """Write documents and tokens in a run directory, unless they are there; they come to its corpus/ and tokens/.

        Args:
            path: The run directory. A training in it, or with `bessemer.train_model(tokens=...)`, reads them.

        Returns:
            The same tokens, written.

        Raises:
            InputError: There is too little text for the vocabulary, or documents or the tokenizer cannot be used.
        """
        run = RunDirectory(Path(path))
        recipe = self.recipe(run.path)
        session = Session(recipe, run)
        with run.lock():
            if self._lend_documents is not None:
                self._lend_documents(run)
            stages.corpus(session)
            try:
                stages.write_tokens(session, recipe)
            except TooFewIds as error:
                if recipe.tokenizer.vocabulary is not None:
                    raise
                stages.write_tokens(session, recipe.changed(tokenizer={"vocabulary": error.supported}))
        return TokenDataset(self.tables, run.path, self._lend_documents)

    def lend(self, run: RunDirectory) -> None:
        """Link corpus and tokens into a run that has none. Raises InputError for one that has other tokens."""
        theirs = RunDirectory(self.store.folder.parent)
        for source, target in ((theirs.corpus, run.corpus), (theirs.tokens, run.tokens)):
            if source.exists():
                link_stage(source, target)
        if TokenStore.open(run.tokens).digest != self.store.digest:
            raise InputError(f"{run.path}: it has other tokens; give the run another name with run.name")

    @cached_property
    def store(self) -> TokenStore:
        """The shards with their manifest; tokens that are not written yet are, in a folder that goes with this process."""
        if self.path is not None:
            return TokenStore.open(RunDirectory(self.path).tokens)
        self._scratch = TemporaryDirectory(prefix="bessemer-")
        return self.write(Path(self._scratch.name) / "tokens").store

    def num_tokens(self, split: str = "train") -> int:
        """Return the number of tokens; split: `train` or `heldout`."""
        return self.store.num_tokens(_checked(split))

    def documents(self, split: str = "train", *sources: str) -> Iterator[TokenDocument]:
        """Iterate over documents.

        Args:
            split: `train` or `heldout`.
            sources: Names of sources; none: all.

        Returns:
            Documents with `identity` (32 hexadecimal digits), `source`, `ids` (an array, end-of-text last) and `label`.

        Raises:
            InputError: There is no such split or source.
        """
        if unknown := [name for name in sources if name not in self.store.sources]:
            raise InputError(f"documents: no source {unknown[0]!r}; there are {', '.join(self.store.sources)}")
        return self.store.documents(_checked(split), *sources)

    def __iter__(self) -> Iterator[TokenDocument]:
        return self.documents()

    def sequences(self, length: int, split: str = "train") -> exports.TokenSequences:
        """Return the sequences of the concatenated documents as a map-style dataset for a DataLoader of torch.

        Args:
            length: Tokens of a sequence.
            split: `train` or `heldout`.

        Returns:
            Items are dicts of int64 arrays (length,): `input_ids`, and `labels`, the token after each.

        Raises:
            InputError: There is no such split, or no sequence of this length.
        """
        return exports.TokenSequences(self.store, length, _checked(split))

    def to_datasets(self, split: str = "train") -> datasets.IterableDataset:
        """Return the documents for Hugging Face `datasets`: also an `IterableDataset` of torch, whose workers share the shards.

        Args:
            split: `train` or `heldout`.

        Returns:
            Rows have the keys `identity`, `source` and `input_ids`.

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
        InputError: There are none.
    """
    tokens = TokenDataset({}, Path(path))
    _ = tokens.store
    return tokens


def _checked(split: str) -> str:
    if split not in SPLITS:
        raise InputError(f"split: {split!r} is neither {' nor '.join(SPLITS)}")
    return split


def link_stage(source: Path, target: Path) -> None:
    """Publish a stage of another run by hard links, where there is none."""
    if not target.exists():
        with staging(target) as staged:
            link_or_copy(source.resolve(), staged)
