"""The tokenizer: train or load it, encode text to ids and decode ids to text.

The tokenizer.json defines the ids. `tokenizers` encodes; a build uses gigatoken, which is many times faster, where its
ids are equal on the whole vocabulary and a sample of the documents.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.common.console import warn
from bessemer.common.errors import InputError, TooFewIds, require_import
from bessemer.tokens.tokenizer import description as content
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.patterns import GPT2, GPT4, PreTokenization, pre_tokenization

if TYPE_CHECKING:
    import gigatoken
    from tokenizers import Encoding
    from tokenizers import Tokenizer as HuggingFaceTokenizer

Ids = npt.NDArray[np.uint32]

MAX_IDS = 2**24


class Tokenizer:
    """An immutable tokenizer, defined by a tokenizer.json.

    Attributes:
        special: Text of the special tokens, by id.
        vocabulary: Number of ids.
        end_of_text: Id of the end-of-text token.
        end_of_text_token: Text of the end-of-text token.
        mask_token: Id of the mask token; None unless one was requested.
        kind: byte-level, bpe, unigram, wordpiece or wordlevel.
        changes: Steps of the normalizer, such as nfc or lowercase.
        text_prefix: Bytes, such as a space, that the tokenizer puts before every text and encodes with it.
        unknown_token: Id of the token for text outside the vocabulary; None if there is none.
    """

    def __init__(self, inner: HuggingFaceTokenizer, end_of_text: str, mask_token: str | None = None) -> None:
        self._inner = inner
        vocabulary = inner.get_vocab()
        self.vocabulary: int = max(vocabulary.values(), default=0) + 1
        if self.vocabulary > MAX_IDS:  # with large gaps the library would run out of memory and abort
            raise InputError(f"tokenizer.path: the id {self.vocabulary - 1} is too large; use ids up to {MAX_IDS - 1}")
        # `transformers` too ignores the truncation and padding in the tokenizer.json.
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        end, names = inner.token_to_id(end_of_text), list(self.special.values())
        if end is None or mask_token not in (None, *names):
            key, token = ("end_of_text", end_of_text) if end is None else ("mask_token", mask_token)
            shown = ", ".join(map(repr, names[:12])) or "none"
            raise InputError(
                f"tokenizer.{key}: the tokenizer has no token {token!r}; choose one of its special tokens: {shown}"
            )
        self.end_of_text, self.end_of_text_token = end, end_of_text
        self.mask_token: int | None = None if mask_token is None else inner.token_to_id(mask_token)
        self._description: dict[str, Any] = json.loads(inner.to_str())
        model = self._description["model"]
        if model.get("dropout"):
            raise InputError(
                "tokenizer.path: BPE dropout gives different ids for the same text; set model.dropout to null in the file"
            )
        self.kind, self.changes = content.kind_of(self._description), content.changes(self._description)
        self.text_prefix = content.prefix_of(self._description)
        unknown = model.get("unk_token")
        self.unknown_token: int | None = model.get("unk_id") if unknown is None else self.id_of(unknown)
        # Ids that no text is encoded to, except that text outside the vocabulary becomes the unknown token.
        closed = {self.end_of_text, *self.special, *self.framing.before, *self.framing.after, self.unknown_token}
        self._closed = [name for name, number in vocabulary.items() if number in closed]
        self._starts = {name[:2] for name in self._closed}
        self._spelled = re.compile("|".join(map(re.escape, sorted(self._closed, key=len, reverse=True))))
        self._fast: str | None = None  # the tokenizer.json for gigatoken, if it encodes

    @classmethod
    def train(
        cls, texts: Iterable[str], vocabulary: int, end_of_text: str, mask_token: str | None = None,
        special_tokens: Sequence[str] = (), regex: str = GPT4, prefix_space: bool = False, normalizer: str | None = None,
    ) -> Tokenizer:  # fmt: skip
        """Train a byte-level BPE.

        Args:
            texts: Texts to train on.
            vocabulary: Number of ids: special tokens, 256 bytes and merges together.
            end_of_text: The end-of-text token.
            mask_token: The mask token, if any.
            special_tokens: More special tokens.
            regex: The split pattern.
            prefix_space: Put a space before every text.
            normalizer: Name of a normalizer class of `tokenizers`, applied to every text first.

        Raises:
            InputError: When `vocabulary` is too small for the bytes and special tokens.
            TooFewIds: When the text supports fewer ids than `vocabulary`.
        """
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        inner = HuggingFaceTokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        inner.decoder = decoders.ByteLevel()
        before = [] if normalizer is None else [getattr(normalizers, normalizer)()]
        if prefix_space:
            before.append(normalizers.Prepend(" "))
            inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        if before:
            inner.normalizer = before[0] if len(before) == 1 else normalizers.Sequence(before)
        special = [end_of_text, *special_tokens]
        if mask_token is not None and mask_token not in special:
            special.append(mask_token)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        tokenizer = cls(inner, end_of_text, mask_token)
        if tokenizer.vocabulary > vocabulary:
            raise InputError(
                f"tokenizer.vocabulary: {vocabulary} is too small for 256 bytes and {', '.join(map(repr, special))}; set "
                f"{tokenizer.vocabulary} or more"
            )
        if tokenizer.vocabulary < vocabulary:
            raise TooFewIds(
                f"tokenizer.vocabulary: {vocabulary} is too large: the text supports only {tokenizer.vocabulary} ids, with no "
                f"pair of tokens left to merge; set {tokenizer.vocabulary}, or add text",
                tokenizer.vocabulary,
            )
        return tokenizer

    @classmethod
    def load(cls, path: Path, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Load a tokenizer.json, which must have the named special tokens; a file that has not changed is cached."""
        facts = path.stat() if path.exists() else None
        version = () if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        return _loaded(path.resolve(), version, end_of_text, mask_token)

    @classmethod
    def load_any(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json whose end-of-text token is unknown or not needed; the first special token serves as it."""
        inner = _read(path)
        special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
        return cls(inner, special[0] if special else next(iter(inner.get_vocab())))

    @classmethod
    def from_json(cls, text: str, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Return the tokenizer of a tokenizer.json's content."""
        return cls(_from(json.loads(text)), end_of_text, mask_token)

    def with_special_tokens(self, names: Sequence[str], end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Return a tokenizer with the special tokens `names`; new ones get ids after the last, existing ones keep theirs."""
        inner = _from(self._description)
        inner.add_special_tokens([name for name in names if name not in self.special.values()])
        if any(self.id_of(name) is None and (inner.token_to_id(name) or 0) < self.vocabulary for name in names):
            raise InputError(
                "tokenizer.special_tokens: no token can be added, because the tokenizer's ids have gaps; remove the key"
            )
        return Tokenizer(inner, end_of_text, mask_token)

    def to_json(self) -> str:
        return str(self._inner.to_str(pretty=True))

    @property
    def sha256(self) -> str:
        """SHA-256 of the tokenizer.json without its post-processor, which an export adds."""
        text = self.to_json()
        if self._description.get("post_processor") is not None:
            text = str(_from(self._description, post_processor=None).to_str(pretty=True))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without recognising special tokens. Raises InputError for invalid Unicode."""
        _require_text(text)
        return [int(token) for token in self._encode([text])[0]]

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are recognised, as in the output of a chat template."""
        return list(self.encode_with_offsets(text).ids)

    def encode_with_offsets(self, text: str) -> Encoding:
        """Encode a text in which special tokens are recognised; the result has `ids` and the (start, end) `offsets` of each."""
        _require_text(text)
        return self._inner.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text in order, end-of-text appended; safe to call from several threads."""
        end = np.array([self.end_of_text], dtype=np.uint32)
        return [np.concatenate([ids, end]) for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            return [self._gigatoken.encode(text) for text in texts]  # one by one, since its batches start threads
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @cached_property
    def _plain(self) -> HuggingFaceTokenizer:
        """The tokenizer of the library, changed so that text that looks like a special token is encoded as plain text."""
        inner = _from(content.without_special(self._description, self._closed))
        inner.encode_special_tokens = True
        return inner

    @cached_property
    def _gigatoken(self) -> gigatoken.Tokenizer:
        assert self._fast is not None
        with require_import("encoding text needs gigatoken; install it with: pip install 'bessemer[corpus]'"):
            import gigatoken
        return gigatoken.Tokenizer.from_json(self._fast)

    @property
    def encoder_name(self) -> Literal["gigatoken", "tokenizers"]:
        """Name of the library that encodes text for this tokenizer."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def accelerate(self, texts: Sequence[str] | None) -> Tokenizer:
        """Return a copy that encodes with the faster library gigatoken if its ids are equal, else this tokenizer.

        For the comparison both libraries encode every token, every special token and `texts`. If `texts` is None, nothing
        is compared, because another process did it.
        """
        description = _for_gigatoken(content.without_special(self._description, self._closed))
        if description is None:
            return self
        faster = copy.copy(self)
        faster._fast = json.dumps(description)
        try:
            _ = faster._gigatoken
        except RuntimeError:  # it does not support this pattern or model
            return self
        vocabulary = [piece.decode(errors="replace") for piece in self.token_byte_values()]
        compared = [] if texts is None else [*vocabulary, *self._inner.get_vocab(), *texts]
        if all(map(np.array_equal, faster._encode(compared), self._encode(compared))):
            return faster
        warn("gigatoken and tokenizers encode this text differently; using tokenizers, which is slower")
        return self

    def special_in(self, text: str) -> list[str]:
        """Return the special tokens that a text contains, in alphabetical order."""
        # Looking for the first characters is much faster than the regular expression.
        return sorted({*self._spelled.findall(text)}) if any(start in text for start in self._starts) else []

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; invalid UTF-8 becomes replacement characters."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the tokenizer does not have it."""
        return self._inner.token_to_id(token)

    @property
    def framing(self) -> Framing:
        """The ids that the tokenizer.json's post-processor puts before and after a text."""
        return content.framing_of(self._inner) or Framing()

    def token_byte_values(self) -> list[bytes]:
        """Return the bytes of text that each id stands for (`description.token_byte_values`); empty for special tokens."""
        return content.token_byte_values(self._description, self._inner.get_vocab(), set(self.special))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return the number of bytes of text of each id; 0 for special tokens."""
        return np.array([len(piece) for piece in self.token_byte_values()], dtype=np.int64)


@lru_cache(maxsize=4)
def _loaded(path: Path, version: tuple[int, ...], end_of_text: str, mask_token: str | None) -> Tokenizer:
    """Load the tokenizer of a file. The cache uses `version`, the file's modification time, size and inode, as a key too."""
    return Tokenizer(_read(path), end_of_text, mask_token)


def _read(path: Path) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    if not path.exists():
        raise InputError(f"{path}: no such file; set tokenizer.path to a tokenizer.json")
    try:
        return HuggingFaceTokenizer.from_file(str(path))
    except BaseException as error:  # the library raises plain Exception, and a panic is not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InputError(f"{path}: not a valid tokenizer.json: {error}; replace the file") from None


def _from(description: dict[str, Any], **changed: Any) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    return HuggingFaceTokenizer.from_str(json.dumps({**description, **changed}))


def _for_gigatoken(description: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json adapted for gigatoken; None if its ids may differ on rare text.

    gigatoken would find added tokens in text, so they are left out. The result is None with added tokens that are not
    special, which must be found in text, and with Unicode normalization, where gigatoken knows characters that
    `tokenizers` does not.
    """
    if any(not token["special"] for token in description["added_tokens"]):
        return None
    if any(change in ("nfc", "nfd", "nfkc", "nfkd") for change in content.changes(description)):
        return None
    if pre_tokenization(description) == PreTokenization(GPT2):  # gigatoken supports only the short form of this one
        description = {
            **description,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        }
    return {**description, "added_tokens": []}


def _require_text(text: str) -> None:
    """Raise InputError for lone surrogates, which result from input that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise InputError(f"invalid character after {before!r}; use text in UTF-8") from None
