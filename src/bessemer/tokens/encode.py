"""Encode batches of documents and conversations to token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus.conversation import contents
from bessemer.tokens.documents import StoredDocument
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import ChatTemplate, TemplateSource
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.tokenizer import Ids


@dataclass
class EncodedCounts:
    """Counts over encoded documents.

    Attributes:
        counted: Bytes of the tokens of texts.
        unknown: Number of tokens for text outside the vocabulary.
        text: Bytes of the texts.
        refusal: Reason for the first conversation that the chat template rejected, with its document.
        refusals: Number of rejected conversations by reason.
        unwritten: Number of conversations by field that the template does not use.
        spelled: Number of documents by special token that their text contains and that is encoded as text.
        controls: Number of conversations by special token that their messages contain.
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
        """Add the counts of other documents."""
        self.refusal = self.refusal or other.refusal
        for name in ("counted", "unknown", "text", "refusals", "unwritten", "spelled", "controls"):
            setattr(self, name, getattr(self, name) + type(getattr(self, name))(getattr(other, name)))

    def to_manifest(self) -> dict[str, Any]:
        """Return the counts as entries of manifest.json, and print warnings about special tokens and unused fields."""
        if self.controls:
            warn(
                f"messages contain the special tokens {', '.join(sorted(self.controls))}, which are encoded as such; "
                "remove them from conversations that you do not trust (special_tokens_in_messages in tokens/manifest.json)"
            )
        if self.unwritten:
            warn(f"tokens.chat_template: ignores these fields of messages: {', '.join(sorted(self.unwritten))}")
        tables = {
            "spelled_special_tokens": self.spelled, "special_tokens_in_messages": self.controls,
            "fields_left_out": self.unwritten, "refusals": self.refusals,
        }  # fmt: skip
        return {name: dict(sorted(table.items())) for name, table in tables.items() if table}


class EncodedDocument(NamedTuple):
    """The tokens of a document.

    Attributes:
        ids: Token ids, end-of-text last; empty for a conversation that the chat template rejected.
        num_bytes: Bytes of text that the ids encode.
        is_trained: True for each id that the loss includes; None: all of them.
    """

    ids: Ids
    num_bytes: int
    is_trained: npt.NDArray[np.bool_] | None = None


def _tokenizer_of(content: str, end_of_text: str, encoder: str) -> Tokenizer:
    tokenizer = Tokenizer.from_json(content, end_of_text)
    return tokenizer.accelerate(None) if encoder == "gigatoken" else tokenizer


# A tokenizer as a dataclass field that is serialised to JSON by content, so that a worker needs no file of this machine.
TokenizerContent = Annotated[
    Tokenizer,
    PlainValidator(lambda values: _tokenizer_of(*values)),
    PlainSerializer(lambda one: [one.to_json(), one.end_of_text_token, one.encoder_name]),
]


@dataclass(frozen=True)
class Encoder:
    """An encoder of batches of documents.

    Attributes:
        tokenizer: The tokenizer.
        framing: Ids around each document, with end-of-text last or before it; None: only end-of-text after it.
        template: The template of conversations; None where there are none.
    """

    tokenizer: TokenizerContent
    framing: Framing | None = None
    template: TemplateSource | None = None

    @cached_property
    def chats(self) -> ChatTemplate | None:
        """The compiled chat template. Raises InputError for a template that cannot be used."""
        return None if self.template is None else ChatTemplate(*self.template, self.tokenizer)

    @cached_property
    def _token_bytes(self) -> npt.NDArray[np.int64]:
        return self.tokenizer.token_bytes()

    @cached_property
    def _is_exact(self) -> bool:
        tokenizer = self.tokenizer
        return tokenizer.kind == "byte-level" and not tokenizer.changes and not tokenizer.text_prefix

    def __call__(self, batch: Sequence[StoredDocument], counts: EncodedCounts) -> list[EncodedDocument]:
        """Encode a batch and add to `counts`.

        Raises BessemerError when the tokens of a reversible tokenizer do not account for every byte.
        """
        own = iter(self.tokenizer.encode_batch([one.text for one in batch if not self._is_chat(one)]))
        return [self._chat(one, counts) if self._is_chat(one) else self._text(one, next(own), counts) for one in batch]

    def _is_chat(self, document: StoredDocument) -> bool:
        return self.template is not None and document.source in self.template.sources

    def _text(self, document: StoredDocument, ids: Ids, counts: EncodedCounts) -> EncodedDocument:
        prefix, unknown = len(self.tokenizer.text_prefix), self.tokenizer.unknown_token
        counted = int(self._token_bytes[ids].sum()) - (prefix if len(ids) > 1 else 0)
        size = len(document.text.encode())
        counts.spelled.update(self.tokenizer.special_in(document.text))
        counts.text += size
        counts.counted += counted
        counts.unknown += int((ids == unknown).sum()) if unknown is not None else 0
        if self._is_exact and counted != size:
            raise BessemerError(
                f"document {document.identity} of {document.source}: its {len(ids)} tokens encode {counted} bytes, but its "
                f"text has {size}; check the tokenizer.json, or report this as a bug"
            )
        return EncodedDocument(self._framed(ids), size)

    def _chat(self, document: StoredDocument, counts: EncodedCounts) -> EncodedDocument:
        """Encode a conversation, or return no ids and count the reason if the template rejects it.

        Special tokens that the template adds encode no bytes of text.
        """
        assert self.chats is not None
        what = f"document {document.identity} of {document.source}"
        try:
            ids, is_trained = self.chats.encode(document.text, what)
        except InputError as error:
            counts.refusals.update([str(error).removeprefix(f"{what}: ")])
            counts.refusal = counts.refusal or str(error)
            return EncodedDocument(np.empty(0, np.uint32), 0)
        counts.controls.update(self.tokenizer.special_in(contents(document.text)))
        counts.unwritten.update(self.chats.unwritten(document.text))
        size = int(self._token_bytes[ids].sum())
        counts.text += size
        counts.counted += size
        return EncodedDocument(ids, size, is_trained)

    def _framed(self, ids: Ids) -> Ids:
        if self.framing is None:
            return ids
        before, after = (np.array(part, np.uint32) for part in (self.framing.before, self.framing.after))
        is_closed = len(after) > 0 and after[-1] == ids[-1]
        return np.concatenate([before, ids[:-1], after[:-1] if is_closed else after, ids[-1:]])
