"""Scoring of the documents of one bucket by the classifier, as a task."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.quality.classify import SCORED_COLUMNS, TableScores, learned_classifier, score_table
from bessemer.corpus.quality.model import Classifier
from bessemer.corpus.work import CorpusTask
from bessemer.recipe import Quality

if TYPE_CHECKING:
    import pyarrow as pa

SCORES = "scores.pickle"


@dataclass(frozen=True)
class ScoreDocuments(CorpusTask):
    """Score the documents of a bucket. documents: their tables; made_of: digest of all; learned: folder of the classifier."""

    number: int
    documents: Callable[[Sequence[str]], Iterator[pa.Table]]
    num_documents: int
    settings: Quality
    sources: tuple[str, ...]
    made_of: str
    learned: Path

    @property
    def folder(self) -> Path:
        return self.work / "scores" / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return self.made_of

    @property
    def size(self) -> int:
        return self.num_documents

    def __str__(self) -> str:
        return f"quality of bucket {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises InputError for a model that cannot be read here, OSError for a full disk."""
        model = _opened(self.settings, self.learned)
        scores = [
            score_table(model, self.sources, table, self.settings.seed) for table in self.documents(SCORED_COLUMNS)
        ]
        (folder / SCORES).write_bytes(pickle.dumps(scores))
        return {}

    def scores(self) -> list[TableScores]:
        """The scores of the finished task."""
        found: list[TableScores] = pickle.loads((self.folder / SCORES).read_bytes())
        return found


@lru_cache(maxsize=1)
def _opened(settings: Quality, folder: Path) -> Classifier:
    return learned_classifier(settings, folder)
