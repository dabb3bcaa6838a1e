"""Documents to ids, in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus.conversation import contents
from bessemer.tokens.documents import StoredDocument
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import ChatTemplate
from bessemer.tokens.tokenizer.framing import Framing
from bessemer.tokens.tokenizer.tokenizer import Ids

BATCH_CHARACTERS = 1 << 20  # of text, or of ids


@dataclass
class EncodedCounts:
    """Counts of encoded documents.

    Attributes:
        counted: Bytes of the tokens of texts.
        unknown: Tokens for text outside the vocabulary.
        text: Bytes of the texts.
        refusal: The reason for the first conversation that the chat template refuses, with its document.
        refusals: The number of these conversations by reason.
        unwritten: The number of conversations by field that the template does not know.
        spelled: The number of documents by special token that their text spells, and that is encoded as text.
        controls: The number of conversations by special token that their messages spell.
    """

    counted: int = 0
    unknown: int = 0
    text: int = 0
    refusal: str = ""
    refusals: Counter[str] = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)
    spelled: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)

    def add(self, other: EncodedCounts) -> None:
        for name in ("counted", "unknown", "text"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refusal = self.refusal or other.refusal
        for name in ("refusals", "unwritten", "spelled", "controls"):
            getattr(self, name).update(getattr(other, name))

    def to_manifest(self) -> dict[str, Any]:
        """Return the counts for the manifest. Warns of special tokens in messages and of fields that templates leave out."""
        if self.controls:
            warn(
                f"messages spell the special tokens {', '.join(sorted(self.controls))}, which they become, as in transformers; "
                "take them out of conversations that you do not trust (special_tokens_in_messages in tokens/manifest.json)"
            )
        if self.unwritten:
            warn(f"the chat template does not know {', '.join(sorted(self.unwritten))} of messages, and leaves it out")
        tables = {
            "spelled_special_tokens": self.spelled, "special_tokens_in_messages": self.controls,
            "fields_left_out": self.unwritten, "refusals": self.refusals,
        }  # fmt: skip
        return {name: dict(sorted(table.items())) for name, table in tables.items() if table}


@dataclass
class EncodedBatch:
    """A batch of documents as tokens. ids: end-of-text included, none of a conversation that is left out; is_trained: of each
    token of a conversation, None for all; num_bytes: of each text."""

    counts: EncodedCounts
    ids: list[Ids] = field(default_factory=list)
    is_trained: list[npt.NDArray[np.bool_] | None] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)


class Encoder:
    """Encodes batches.

    chats: renders conversations; framing: ids around each document, the last of them end-of-text or before it.
    """

    def __init__(self, tokenizer: Tokenizer, framing: Framing | None, chats: ChatTemplate | None = None) -> None:
        self.tokenizer, self.framing, self.chats = tokenizer, framing, chats
        self.token_bytes = tokenizer.token_bytes()
        self.is_exact = tokenizer.kind == "byte-level" and not tokenizer.changes and not tokenizer.text_prefix

    def __call__(self, batch: list[StoredDocument]) -> EncodedBatch:
        """Encode a batch. Raises BessemerError when the tokens of a reversible tokenizer do not account for every byte."""
        documents = [item for item in batch if item.ids is None and not self._is_chat(item)]
        own = self.tokenizer.encode_batch([document.text for document in documents])
        counts, remaining = EncodedCounts(), iter(own)
        encoded = EncodedBatch(counts)
        prefix, unknown = len(self.tokenizer.text_prefix), self.tokenizer.unknown_token
        for item in batch:
            if self._is_chat(item):
                self._add_chat(item, encoded)
                continue
            ids = next(remaining) if item.ids is None else item.ids
            size = counted = int(self.token_bytes[ids].sum()) - (prefix if len(ids) > 1 else 0)
            if item.ids is None:
                counts.spelled.update(self.tokenizer.special_in(item.text))
                size = len(item.text.encode())
                counts.text += size
                counts.counted += counted
                counts.unknown += int((ids == unknown).sum()) if unknown is not None else 0
            if self.is_exact and counted != size:
                raise BessemerError(
                    f"document {item.identity} of {item.source}: its {len(ids)} tokens stand for {counted} bytes, but its text "
                    f"has {size}; this is an error in Bessemer or in the tokenizer.json"
                )
            encoded.num_bytes.append(size)
            encoded.ids.append(self._framed(ids) if item.ids is None else ids)
            encoded.is_trained.append(None)
        return encoded

    def _is_chat(self, item: StoredDocument) -> bool:
        return self.chats is not None and item.source in self.chats.sources

    def _add_chat(self, item: StoredDocument, encoded: EncodedBatch) -> None:
        """A conversation: the template puts its own tokens around it, which stand for no bytes where they are special. One that
        the template refuses is left out and counted."""
        assert self.chats is not None
        counts, what = encoded.counts, f"document {item.identity} of {item.source}"
        try:
            ids, is_trained = self.chats.encode(item.text, what)
        except InputError as error:
            ids, is_trained = np.empty(0, np.uint32), np.empty(0, np.bool_)
            counts.refusals.update([str(error).removeprefix(f"{what}: ")])
            counts.refusal = counts.refusal or str(error)
        else:
            counts.controls.update(self.tokenizer.special_in(contents(item.text)))
            counts.unwritten.update(self.chats.unwritten(item.text))
        size = int(self.token_bytes[ids].sum())
        encoded.counts.text += size
        encoded.counts.counted += size
        encoded.num_bytes.append(size)
        encoded.ids.append(ids)
        encoded.is_trained.append(is_trained)

    def _framed(self, ids: Ids) -> Ids:
        if self.framing is None:
            return ids
        before, after = (np.array(part, np.uint32) for part in (self.framing.before, self.framing.after))
        is_closed = len(after) > 0 and after[-1] == ids[-1]
        return np.concatenate([before, ids[:-1], after[:-1] if is_closed else after, ids[-1:]])


def batches(items: Iterable[StoredDocument], characters: int = BATCH_CHARACTERS) -> Iterator[list[StoredDocument]]:
    """Documents in batches of about so many characters, in order; a longer document is a batch of its own."""
    batch: list[StoredDocument] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text) if item.ids is None else len(item.ids)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
