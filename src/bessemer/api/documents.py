"""Lazy text datasets for Python: read, filter, deduplicate and tokenize documents with the corpus stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import tomli_w

from bessemer.api import exports, html
from bessemer.api.keys import make_recipe, run_table, use_of, with_keys
from bessemer.api.tokens import TokenDataset, link_stage
from bessemer.common.console import say
from bessemer.common.errors import InputError
from bessemer.common.extensions import is_of_process
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.storage.path import published_folder
from bessemer.tokens.documents import part_files, read_rows
from bessemer.workflow import stages
from bessemer.workflow.session import Session

if TYPE_CHECKING:
    import datasets

    from bessemer.corpus.filters.base import Filter
    from bessemer.storage.filesystem import AnyPath

SHOWN = 5  # documents shown in a notebook
EXCERPT = 200  # characters shown of each document


class TextDataset:
    """A lazy dataset of text documents: its sources and the steps that process them.

    Create one with `bessemer.read`. Each method returns another dataset, and nothing is read until documents are needed. Then
    the corpus stage builds them, in processes on this machine or on the engine that `corpus.engine` names, and counts each
    rejected document under its reason.

    Attributes:
        keys: Keys of the recipe's [corpus] table.
        path: Run directory that the documents were written to; None before `write`.
    """

    def __init__(self, keys: Mapping[str, Any], path: Path | None = None) -> None:
        self.keys, self.path = dict(keys), path

    def add(self, *paths: str | Path, name: str = "text", **source: Any) -> TextDataset:
        """Return a dataset with one more source.

        Args:
            paths: Files, folders, globs and URLs of object stores.
            name: Name of the source in statistics and reports.
            source: Other keys of [[corpus.sources]], such as `format="jsonl"`, `text_key="body"` or `label="news"`.

        Raises:
            InputError: A key is invalid, or another source has this name.
        """
        places = [str(path) if "://" in str(path) else str(Path(path).expanduser().absolute()) for path in paths]
        sources = [*self.keys.get("sources", ()), {"name": name, "paths": places, **source}]
        return self._with({"sources": sources})

    def filter(self, *filters: Filter) -> TextDataset:
        """Return a dataset whose documents also pass `filters`, in this order, after the rules of `corpus.rules`.

        Args:
            filters: Filters from `bessemer.filters`, or instances of your own `Filter` class. A class defined in a notebook
                cell runs in this process only; define it in a file to use several workers, Ray or Slurm.

        Raises:
            InputError: A class cannot be used as a filter.
        """
        return self._with({"filters": [*self.keys.get("filters", ()), *(use_of("filters", one) for one in filters)]})

    def deduplicate(self, **keys: Any) -> TextDataset:
        """Return a dataset without exact and near duplicates.

        Args:
            keys: Keys of [corpus.dedup], such as `min_jaccard=0.7` or `minhash=False`.

        Raises:
            InputError: A key is invalid.
        """
        return self._with({"dedup": {"exact": True, "minhash": True, **keys}})

    def configure(self, keys: Mapping[str, Any]) -> TextDataset:
        """Return a dataset with other keys of [corpus] set.

        Args:
            keys: Dotted keys and their values, such as `{"language.identify": True, "engine": "slurm"}`.

        Raises:
            InputError: A key is invalid.
        """
        return self._with(with_keys(self.keys, keys))

    def tokenize(
        self, *, vocabulary: int | None = None, tokenizer: str | Path | None = None, **keys: Any
    ) -> TokenDataset:
        """Return a lazy dataset of the documents' tokens.

        Args:
            vocabulary: Vocabulary size of a tokenizer trained on the documents. None: 32,768, or as many ids as the text
                supports.
            tokenizer: A tokenizer.json, a folder that contains one, or `hf:ORG/NAME`. It replaces the trained tokenizer.
            keys: Keys of [tokens], such as `sequence_length=1024`, `held_out=0.01` or `packing="best-fit"`.

        Raises:
            InputError: A key is invalid.
        """
        given = {"vocabulary": vocabulary, "path": tokenizer and str(tokenizer)}
        chosen = {key: value for key, value in given.items() if value is not None}
        tokens = TokenDataset({"corpus": self.keys, "tokenizer": chosen, "tokens": keys}, lend=self.lend)
        tokens.recipe(Path("tokens"))
        return tokens

    def write(self, path: str | Path) -> TextDataset:
        """Build the documents in the `corpus/` folder of a run directory, unless they are already there.

        Args:
            path: The run directory.

        Returns:
            A dataset that reads the written documents.

        Raises:
            InputError: Files do not match their source's keys, no document is left, or the run trained a model on other
                documents.
        """
        run = RunDirectory(Path(path))
        session = Session(self.recipe(run.path), run)
        with run.lock():
            self.lend(run)
            stages.corpus(session)
        return TextDataset(self.keys, run.path)

    def lend(self, run: RunDirectory) -> None:
        """Hard-link this dataset's documents, if they have been built, into the run directory `run`.

        A run that already has documents is left unchanged.
        """
        if self.path is not None or "_run" in self.__dict__:
            link_stage(self._run.corpus, run.corpus)

    def recipe(self, path: Path) -> Recipe:
        """Return the recipe that builds these documents in the run directory `path`.

        Raises:
            InputError: A key is invalid.
        """
        return make_recipe({**run_table(path), "corpus": self.keys})

    @property
    def statistics(self) -> dict[str, Any]:
        """Numbers of documents read, kept and rejected, by source and by reason, as in statistics.json."""
        return dict(read_json(self._run.corpus / "statistics.json"))

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Yield each document as a dict of strings.

        The keys are identity, text, source, path (the file it was read from), place (its position in that file), url,
        language, metadata (a JSON object) and label.
        """
        from bessemer.corpus.document import COLUMNS

        for batch in read_rows(self._files, list(COLUMNS)):
            yield from batch.to_pylist()

    def take(self, count: int) -> list[dict[str, str]]:
        """Return the first `count` documents."""
        return list(islice(self, count))

    def sample(self, count: int = 1000) -> dict[str, Any]:
        """Run a sample of documents through the filters in seconds, without building the corpus.

        Args:
            count: Approximate number of documents to read, over all sources.

        Returns:
            Counts and examples by source and reason, as `bessemer corpus --sample --json` prints them.

        Raises:
            InputError: For the reasons listed at `write`.
        """
        from bessemer.corpus.dry_run import dry_run

        if count < 1:
            raise InputError(f"sample: count {count} is too small; set at least 1")
        return dry_run(self.recipe(Path("documents")).corpus, count)

    def to_datasets(self) -> datasets.IterableDataset:
        """Return the documents as a Hugging Face `IterableDataset`.

        It is also an `IterableDataset` of torch. The workers of a DataLoader divide the files among themselves.
        """
        return exports.datasets_of_parquet([str(path) for path in self._files])

    @cached_property
    def _run(self) -> RunDirectory:
        """Run directory with the documents. Documents that were not written are built in a temporary one, removed at exit."""
        if self.path is not None:
            return RunDirectory(self.path)
        self._scratch = TemporaryDirectory(prefix="bessemer-")
        return RunDirectory(self.write(Path(self._scratch.name) / "documents").path or Path())

    @property
    def _files(self) -> list[AnyPath]:
        return part_files(published_folder(self._run.corpus) / "documents")

    def _with(self, keys: Mapping[str, Any]) -> TextDataset:
        """Return a dataset with these keys of [corpus] set.

        If a filter is defined in a notebook, one local process builds the documents. InputError is raised if `workers` or
        `engine` asks for anything else.
        """
        changed = {**self.keys, **keys}
        names = [use["use"].partition("@")[0] for use in changed.get("filters", ()) if is_of_process(use["use"])]
        if names and "workers" not in changed:
            say(f"  {names[0]} is not defined at the top level of a file: filtering runs in this process only")
        if names and (changed.get("engine", "local"), changed.setdefault("workers", 1)) != ("local", 1):
            raise InputError(
                f"{names[0]} is defined in a notebook, so only one local worker can use it; move it to a file"
            )
        copy = TextDataset(changed)
        copy.recipe(Path("documents"))
        return copy

    def __repr__(self) -> str:
        names = ", ".join(source["name"] for source in self.keys.get("sources", ()))
        return f"<documents of {names}{f' in {self.path}' if self.path else ''}>"

    def _repr_html_(self) -> str:
        if self.path is None and "_run" not in self.__dict__:
            return html.table("Documents, not built yet", [("[corpus]", tomli_w.dumps(self.keys))])
        from bessemer.corpus.statistics import result_line

        rows = ((row["source"], row["path"], row["text"][:EXCERPT]) for row in self.take(SHOWN))
        return html.table(result_line(self.statistics), rows, ("source", "path", "text"))


def read(*paths: str | Path, name: str = "text", **source: Any) -> TextDataset:
    """Return a lazy dataset of the documents in files, with duplicates kept until `deduplicate` is called.

    Args:
        paths: Files, folders, globs and URLs of object stores.
        name: Name of the source in statistics and reports. Add more sources with `add`.
        source: Other keys of [[corpus.sources]], such as `format="jsonl"` or `text_key="body"`.

    Raises:
        InputError: A key is invalid.
    """
    return TextDataset({"dedup": {"exact": False, "minhash": False}}).add(*paths, name=name, **source)
