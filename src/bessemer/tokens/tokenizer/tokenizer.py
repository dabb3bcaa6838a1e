"""The tokenizer: trained or loaded, text to ids and back.

The tokenizer.json is the definition, and its ids are the ones that count. `tokenizers` encodes; a build uses gigatoken, which is
many times as fast, where its ids are the same on the whole vocabulary and a sample of the documents.
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
    """Text to ids and back; immutable.

    special: special tokens by id; vocabulary: number of ids; mask_token: id of the mask token, None where none was required;
    kind: byte-level, bpe, unigram, wordpiece or wordlevel; changes: what the normalizer does to text, such as nfc or
    lowercase; text_prefix: what is put before every text, which the bytes of its first token include; unknown_token: the id of
    text outside the vocabulary, None where there is no such text.
    """

    def __init__(self, inner: HuggingFaceTokenizer, end_of_text: str, mask_token: str | None = None) -> None:
        self._inner = inner
        vocabulary = inner.get_vocab()
        self.vocabulary: int = max(vocabulary.values(), default=0) + 1
        if self.vocabulary > MAX_IDS:  # the library ends the process for want of memory, where there are large gaps
            raise InputError(f"tokenizer.path: it has the id {self.vocabulary - 1}; ids up to {MAX_IDS - 1} are read")
        # `transformers` truncates and pads as its caller says, not as the tokenizer.json was saved.
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}
        end, names = inner.token_to_id(end_of_text), list(self.special.values())
        if end is None or mask_token not in (None, *names):
            key, token = ("end_of_text", end_of_text) if end is None else ("mask_token", mask_token)
            shown = ", ".join(map(repr, names[:12])) or "none"
            raise InputError(
                f"tokenizer.{key}: the tokenizer has no token {token!r}; name the one it uses; its special tokens: {shown}"
            )
        self.end_of_text, self.end_of_text_token = end, end_of_text
        self.mask_token: int | None = None if mask_token is None else inner.token_to_id(mask_token)
        self._description: dict[str, Any] = json.loads(inner.to_str())
        model = self._description["model"]
        if model.get("dropout"):
            raise InputError(
                "tokenizer.path: its BPE has dropout, so that the same text gives other ids each time; set model.dropout "
                "to null in the file"
            )
        self.kind, self.changes = content.kind_of(self._description), content.changes(self._description)
        self.text_prefix = content.prefix_of(self._description)
        unknown = model.get("unk_token")
        self.unknown_token: int | None = model.get("unk_id") if unknown is None else self.id_of(unknown)
        # ids that no text becomes, but what is outside the vocabulary the last
        closed = {self.end_of_text, *self.special, *self.framing.before, *self.framing.after, self.unknown_token}
        self._closed = [name for name, number in vocabulary.items() if number in closed]
        self._starts = {name[:2] for name in self._closed}
        self._spelled = re.compile("|".join(map(re.escape, sorted(self._closed, key=len, reverse=True))))
        self._fast: str | None = None  # the tokenizer.json for gigatoken, where that encodes

    @classmethod
    def train(
        cls, texts: Iterable[str], vocabulary: int, end_of_text: str, mask_token: str | None = None,
        special_tokens: Sequence[str] = (), regex: str = GPT4, prefix_space: bool = False, normalizer: str | None = None,
    ) -> Tokenizer:  # fmt: skip
        """Train a byte-level BPE of `vocabulary` ids: end-of-text, `special_tokens`, the mask token if any, 256 bytes, merges.

        regex: the split pattern; prefix_space: put a space before every text; normalizer: a class of `tokenizers`, applied
        to every text first.
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
                f"tokenizer.vocabulary: {vocabulary} ids do not hold the 256 bytes and {', '.join(map(repr, special))}; give "
                f"{tokenizer.vocabulary} or more"
            )
        if tokenizer.vocabulary < vocabulary:
            raise TooFewIds(
                f"tokenizer.vocabulary = {vocabulary}: the text supports only {tokenizer.vocabulary} ids (no pair of tokens is "
                f"left to merge); give tokenizer.vocabulary = {tokenizer.vocabulary}, or add text",
                tokenizer.vocabulary,
            )
        return tokenizer

    @classmethod
    def load(cls, path: Path, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Load a tokenizer.json; it must have the named special tokens. A file that has not changed is read once."""
        facts = path.stat() if path.exists() else None
        version = () if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        return _loaded(path.resolve(), version, end_of_text, mask_token)

    @classmethod
    def load_any(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json whose end-of-text is not known or needed; the first special token stands in for it."""
        inner = _read(path)
        special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
        return cls(inner, special[0] if special else next(iter(inner.get_vocab())))

    @classmethod
    def from_json(cls, text: str, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Return the tokenizer of a tokenizer.json's content."""
        return cls(_from(json.loads(text)), end_of_text, mask_token)

    def with_special_tokens(self, names: Sequence[str], end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Add special tokens after the last id; those that it has stay as they are."""
        inner = _from(self._description)
        inner.add_special_tokens([name for name in names if name not in self.special.values()])
        if any(self.id_of(name) is None and (inner.token_to_id(name) or 0) < self.vocabulary for name in names):
            raise InputError(
                "tokenizer.special_tokens: the tokenizer's ids have gaps, so that no token can be added to it"
            )
        return Tokenizer(inner, end_of_text, mask_token)

    def to_json(self) -> str:
        return str(self._inner.to_str(pretty=True))

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json without its post-processor: equal for a trained and an exported tokenizer."""
        text = self.to_json()
        if self._description.get("post_processor") is not None:
            text = str(_from(self._description, post_processor=None).to_str(pretty=True))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; text that looks like a special token is text. Raises InputError for what is no Unicode text."""
        _require_text(text)
        return [int(token) for token in self._encode([text])[0]]

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are recognised, as in the output of a chat template."""
        return list(self.encode_with_places(text).ids)

    def encode_with_places(self, text: str) -> Encoding:
        """The same with the places of the tokens in the text."""
        _require_text(text)
        return self._inner.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, end-of-text appended, in order; safe to call from several threads."""
        end = np.array([self.end_of_text], dtype=np.uint32)
        return [np.concatenate([ids, end]) for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            return [self._gigatoken.encode(text) for text in texts]  # on this thread, unlike its batches
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @cached_property
    def _plain(self) -> HuggingFaceTokenizer:
        """A copy in which text that looks like a special token is text, whatever the model would make of it."""
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
        """The library that encodes."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def accelerate(self, texts: Sequence[str] | None) -> Tokenizer:
        """Return a copy that encodes with gigatoken where its ids are the same, else this tokenizer.

        Compared are every token's text, every special token's text and `texts`; None: another process has compared them.
        """
        description = _for_gigatoken(content.without_special(self._description, self._closed))
        if description is None:
            return self
        faster = copy.copy(self)
        faster._fast = json.dumps(description)
        try:
            _ = faster._gigatoken
        except RuntimeError:  # a pattern or a model that it does not know
            return self
        vocabulary = [piece.decode(errors="replace") for piece in self.token_byte_values()]
        compared = [] if texts is None else [*vocabulary, *self._inner.get_vocab(), *texts]
        if all(map(np.array_equal, faster._encode(compared), self._encode(compared))):
            return faster
        warn("gigatoken and the tokenizer.json disagree on this text; encoding with tokenizers, which is slower")
        return self

    def special_in(self, text: str) -> list[str]:
        """Return the special tokens that a text spells, in alphabetical order."""
        # a quick look for their beginnings comes first
        return sorted({*self._spelled.findall(text)}) if any(start in text for start in self._starts) else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, bytes that are not UTF-8 become replacement characters."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """The id of a token; None where there is none of this name."""
        return self._inner.token_to_id(token)

    @property
    def framing(self) -> Framing:
        """The ids that the tokenizer.json puts around a text."""
        return content.framing_of(self._inner) or Framing()

    def token_byte_values(self) -> list[bytes]:
        """The bytes of each id (`vocabulary.token_byte_values`); none for special tokens."""
        return content.token_byte_values(self._description, self._inner.get_vocab(), set(self.special))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Number of bytes of text of each id; 0 for special tokens."""
        return np.array([len(piece) for piece in self.token_byte_values()], dtype=np.int64)


@lru_cache(maxsize=4)
def _loaded(path: Path, version: tuple[int, ...], end_of_text: str, mask_token: str | None) -> Tokenizer:
    """The tokenizer of a file, whose time, size and number are its version."""
    return Tokenizer(_read(path), end_of_text, mask_token)


def _read(path: Path) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    if not path.exists():
        raise InputError(f"{path}: no such tokenizer file")
    try:
        return HuggingFaceTokenizer.from_file(str(path))
    except BaseException as error:  # the library raises plain Exception, and a panic is not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InputError(f"{path}: not a tokenizer.json: {error}") from None


def _from(description: dict[str, Any], **changed: Any) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    return HuggingFaceTokenizer.from_str(json.dumps({**description, **changed}))


def _for_gigatoken(description: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a tokenizer.json as gigatoken must read it; None where its ids may differ on rare text.

    It would find added tokens in text, so they are left out. Those that are no special tokens have to be found before the text is
    cut, and its Unicode normalization knows characters that `tokenizers` does not.
    """
    if any(not token["special"] for token in description["added_tokens"]):
        return None
    if any(change in ("nfc", "nfd", "nfkc", "nfkd") for change in content.changes(description)):
        return None
    if pre_tokenization(description) == PreTokenization(GPT2):  # which it knows in the short form only
        description = {
            **description,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        }
    return {**description, "added_tokens": []}


def _require_text(text: str) -> None:
    """Raise InputError for halves of characters, which input that is not UTF-8 becomes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(error.start - 20, 0) : error.start]
        raise InputError(f"what follows {before!r} is no character; is the input UTF-8?") from None
