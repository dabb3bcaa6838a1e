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
        counted: Bytes of text that the tokens encode; equals `text` if the tokenizer is lossless.
        unknown: Number of unknown tokens, which stand for text outside the vocabulary.
        text: Bytes of UTF-8 text that was encoded.
        refusal: Error of the first conversation that the chat template rejected; it names the document.
        refusals: For each reason, the number of conversations rejected for it.
        unwritten: For each message field that the template does not use, the number of conversations that have it.
        spelled: For each special token, the number of documents whose text contains it, encoded as plain text.
        controls: For each special token, the number of conversations whose messages contain it, encoded as that token.
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
        """Add the counts over other documents to these."""
        self.refusal = self.refusal or other.refusal
        for name in ("counted", "unknown", "text", "refusals", "unwritten", "spelled", "controls"):
            setattr(self, name, getattr(self, name) + type(getattr(self, name))(getattr(other, name)))

    def to_manifest(self) -> dict[str, Any]:
        """Return the four tables of counts, without empty ones, as entries of manifest.json.

        Warns about special tokens in conversations and about fields of messages that the template does not use.
        """
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
        is_trained: True for each id that is a target of the loss; None: all of them.
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
        framing: Ids to add before and after each text, where end-of-text stays last; None: only the end-of-text.
        template: The chat template and the sources that it is for; None without conversations.
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
        """Encode a batch of documents in order, and add its counts to `counts`.

        Raises BessemerError if the tokens of a lossless tokenizer do not have as many bytes as the text.
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
        """Encode a conversation. If the template rejects it, count the reason and return no ids.

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
