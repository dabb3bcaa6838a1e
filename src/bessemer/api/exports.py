"""Exports of documents and tokens as datasets of torch and Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import InputError, require_import
from bessemer.tokens.loader import ConcatenatedSplit
from bessemer.tokens.shards import TokenStore


class TokenSequences:
    """A map-style dataset of fixed-length sequences, cut from the concatenated documents of each source.

    An item is a dict with `input_ids` and `targets`, the input ids shifted by one token.
    """

    def __init__(self, store: TokenStore, length: int, split: str) -> None:
        if length < 1:
            raise InputError(f"sequences: length {length} is too small; set at least 1")
        self._splits = [ConcatenatedSplit(store.split(name, split), length) for name in store.sources]
        self._ends = np.cumsum([len(one) for one in self._splits])
        if not len(self):
            raise InputError(f"sequences: no source has {length + 1} tokens; choose a shorter length")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> dict[str, npt.NDArray[np.int64]]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = int(np.searchsorted(self._ends, number, side="right"))
        split = self._splits[part]
        rows = split.rows(np.array([number - int(self._ends[part]) + len(split)]))
        return {"input_ids": rows.inputs[0].astype(np.int64), "targets": rows.targets[0].astype(np.int64)}


def _datasets() -> Any:
    with require_import("to_datasets needs datasets; install it with: pip install datasets"):
        import datasets
    return datasets


def datasets_of_parquet(paths: list[str]) -> Any:
    """Return a streaming Hugging Face dataset of the rows of Parquet files."""
    return _datasets().load_dataset("parquet", data_files=paths, split="train", streaming=True)


def datasets_of_tokens(store: TokenStore, split: str) -> Any:
    """Return a Hugging Face dataset of the tokenized documents of a split; DataLoader workers divide the shards."""
    shards = [(name, shard.path.name) for name in store.sources for shard in store.split(name, split).shards]
    return _datasets().IterableDataset.from_generator(_rows, gen_kwargs={"folder": str(store.folder), "shards": shards})


def _rows(folder: str, shards: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    store = TokenStore.open(Path(folder))
    for source, name in shards:
        for document in store.documents_in(source, store.shard(name)):
            yield {"identity": document.identity, "source": source, "input_ids": document.ids.astype(np.int64)}
