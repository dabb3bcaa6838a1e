"""The text that a tokenizer is trained on, drawn by tasks of the corpus's engine: the same texts as `documents.training_sample`.

WORK/counted/000012/   bytes of text by source in some row groups of a part file of the corpus
WORK/sampled/000012/   texts.parquet: the sample's texts among them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.corpus import worker
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import digest
from bessemer.recipe import Recipe, Work
from bessemer.store_path import opened
from bessemer.tokens import documents

TEXTS = "texts.parquet"
READING = 10  # to read a text takes so much less time than to encode it


def training_sample(recipe: Recipe, corpus: Path, work: Path, task_bytes: int, engine: Work) -> Iterator[str]:
    """As `documents.training_sample`. corpus, work: `tasks.exchange_of`; engine: where the tasks are done. Raises what tasks
    raise (`worker.run_tasks`)."""
    import pyarrow.parquet as parquet

    places, sizes = list(documents.row_groups(corpus, task_bytes)), Counter[str]()
    counting = [CountTexts(work, number, *place) for number, place in enumerate(places)]
    for done in worker.run_tasks("counting text", "B", counting, 1 / READING, engine):
        sizes.update(done["bytes"])
    shares = documents.sample_shares(recipe, sizes)
    sampling = [
        SampleTexts(one.work, one.number, one.path, one.groups, one.num_bytes, recipe, shares) for one in counting
    ]
    for task, _ in zip(
        sampling,
        worker.run_tasks("drawing the tokenizer's sample", "B", sampling, 1 / READING, engine),
        strict=True,
    ):
        with parquet.ParquetFile(opened(task.folder / TEXTS)) as file:
            for batch in file.iter_batches(batch_size=documents.BATCH_DOCUMENTS):
                yield from batch.column("text").to_pylist()


@dataclass(frozen=True)
class RowGroupTask(CorpusTask):
    """A task on some row groups of a part file. num_bytes: of their text."""

    number: int
    path: Path
    groups: range
    num_bytes: int

    stage = "tokens"

    @property
    def size(self) -> int:
        return self.num_bytes

    def __str__(self) -> str:
        return f"text of {self.path.name}, row groups {self.groups.start} to {self.groups.stop - 1}"


class CountTexts(RowGroupTask):
    """Count the bytes of text of each source in some row groups of a part file."""

    @property
    def folder(self) -> Path:
        return self.work / "counted" / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return "count"

    def make(self, folder: Path) -> dict[str, Any]:
        """Writes nothing but the receipt."""
        return {
            "bytes": documents.bytes_by_source(
                documents.batches_of_row_groups(self.path, self.groups, ["source", "text"])
            )
        }


@dataclass(frozen=True)
class SampleTexts(RowGroupTask):
    """Write the texts of some row groups that belong to the sample. shares: of each source's text."""

    recipe: Recipe
    shares: dict[str, float]

    @property
    def folder(self) -> Path:
        return self.work / "sampled" / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return digest("sample", self.shares)

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        texts = list(documents.sampled(self.recipe, documents.of_row_groups(self.path, self.groups), self.shares))
        parquet.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), folder / TEXTS)
        return {}
