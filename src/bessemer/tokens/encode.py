"""Documents to ids in several threads, in the order of the documents: what comes out does not depend on their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bessemer.errors import BessemerError
from bessemer.tokens.documents import Document
from bessemer.tokens.fertility import Gauge, Tally
from bessemer.tokens.foreign import ForeignDocument
from bessemer.tokens.pieces import Framing
from bessemer.tokens.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 20  # of text, or of ids that are there already: what a thread takes at one time
Item = Document | ForeignDocument


@dataclass
class Encoded:
    """A batch of documents as tokens. ids: end-of-text included; num_bytes: of each text.

    counted: bytes that the tokens stand for, all documents together; unknown: tokens that stand for text the vocabulary
    cannot say; tally: the fertility of those documents that are in its sample.
    """

    ids: list[npt.NDArray[np.uint32]]
    num_bytes: list[int]
    counted: int = 0
    unknown: int = 0
    tally: Tally = field(default_factory=dict)


@dataclass(frozen=True)
class Encoder:
    """Encodes batches; threads call it side by side. others: the tokenizers that are compared with this one; framing: ids around
    each document, the last of them end-of-text or before it."""

    tokenizer: Tokenizer
    token_bytes: npt.NDArray[np.int64]
    gauge: Gauge
    others: tuple[Tokenizer, ...] = ()
    framing: Framing | None = None

    def __call__(self, batch: list[Item]) -> Encoded:
        """Encode a batch. Raises BessemerError when the tokens of a reversible tokenizer do not account for every byte."""
        documents = [item for item in batch if isinstance(item, Document)]
        made = iter(self.tokenizer.encode_batch([document.text for document in documents]))
        found = Encoded([next(made) if isinstance(item, Document) else item.ids for item in batch], [])
        exact = self.tokenizer.is_byte_level and not self.tokenizer.changes and not self.tokenizer.text_prefix
        prefix, unknown = len(self.tokenizer.text_prefix), self.tokenizer.unknown_token
        for item, ids in zip(batch, found.ids, strict=True):
            counted = int(self.token_bytes[ids].sum()) - (prefix if len(ids) > 1 else 0)
            size = len(item.text.encode()) if isinstance(item, Document) else counted
            if exact and counted != size:
                raise BessemerError(
                    f"document {item.identity} of {item.source}: its {len(ids)} tokens stand for {counted} bytes, but its text "
                    f"has {size}; this is an error in Bessemer or in the tokenizer.json"
                )
            found.num_bytes.append(size)
            if isinstance(item, Document):
                found.counted += counted
                found.unknown += int((ids == unknown).sum()) if unknown is not None else 0
        self._measure(
            documents, [ids for item, ids in zip(batch, found.ids, strict=True) if isinstance(item, Document)], found
        )
        if self.framing is not None:
            found.ids = [
                self._framed(ids) if isinstance(item, Document) else ids
                for item, ids in zip(batch, found.ids, strict=True)
            ]
        return found

    def _framed(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        assert self.framing is not None
        before, after = (np.array(part, np.uint32) for part in (self.framing.before, self.framing.after))
        end = ids[-1:]
        closed = len(after) > 0 and after[-1] == end[0]
        return np.concatenate([before, ids[:-1], after[:-1] if closed else after, end])

    def _measure(self, documents: list[Document], ids: list[npt.NDArray[np.uint32]], found: Encoded) -> None:
        chosen = [number for number, document in enumerate(documents) if self.gauge.takes(document.identity)]
        texts = [documents[number].text for number in chosen]
        theirs = [other.encode_batch(texts) for other in self.others]
        for place, number in enumerate(chosen):
            document = documents[number]
            every = [ids[number][:-1], *(encoded[place][:-1] for encoded in theirs)]
            self.gauge.measure(document.source, document.language, document.text, every, found.tally)


def batches(items: Iterable[Item], characters: int = BATCH_CHARACTERS) -> Iterator[list[Item]]:
    """Documents in batches of about so many characters, in order; a longer document is a batch of its own."""
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += len(item.text) if isinstance(item, Document) else len(item.ids)
        if held >= characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def in_order(
    given: Iterable[list[Item]], work: Callable[[list[Item]], Encoded], workers: int
) -> Iterator[tuple[list[Item], Encoded]]:
    """`work` of each in so many threads, with its result, in the order given; at most workers + 1 are in memory."""
    waiting: deque[tuple[list[Item], Future[Encoded]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        for one in given:
            waiting.append((one, pool.submit(work, one)))
            if len(waiting) > workers:
                done, result = waiting.popleft()
                yield done, result.result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
