"""What training reads: bytes a second against what the storage gives. (How full the sequences are packed is counted from the
tokens themselves: bessemer.tokens.outlook.)"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.errors import InputError


def token_bytes(vocabulary: int) -> int:
    """Of a token on disk: 2 when every id fits in 16 bits, else 4, as the token shards are written."""
    if vocabulary < 1:
        raise InputError(f"vocabulary: {vocabulary} ids; give one or more")
    return 2 if vocabulary <= 1 << 16 else 4


@dataclass(frozen=True)
class Loading:
    """rate: bytes/s that all readers take together; per_reader: each of them; bytes: of the whole run; share: of what the storage
    gives; None where that is not said; enough: whether it is."""

    rate: float
    per_reader: float
    bytes: float
    share: float | None
    enough: bool | None


def loading(
    tokens_per_second: float,
    vocabulary: int,
    *,
    tokens: float = 0.0,
    readers: int = 1,
    packed: float = 1.0,
    storage: float | None = None,
) -> Loading:
    """The rate at which tokens must come from storage.

    tokens_per_second: of the whole run; tokens: of the whole run; readers: data-parallel ranks, each of which reads its own part
    (the ranks of a tensor, pipeline or context group would read the same); packed: share of a sequence that is not padding;
    storage: bytes/s it gives to all readers together.
    """
    if not tokens_per_second > 0 or readers < 1 or tokens < 0:
        raise InputError(f"{tokens_per_second:g} tokens/s for {readers} readers: both must be above zero")
    if not 0 < packed <= 1:
        raise InputError(f"packed: {packed:g} is not a share of a sequence above 0 and up to 1")
    if storage is not None and not storage > 0:
        raise InputError(f"storage: {storage:g} bytes/s is not above zero")
    size = token_bytes(vocabulary)
    rate = tokens_per_second * packed * size
    return Loading(
        rate=rate,
        per_reader=rate / readers,
        bytes=tokens * packed * size,
        share=None if storage is None else rate / storage,
        enough=None if storage is None else rate <= storage,
    )
