"""The tokenizer: trained, loaded, and the ways through it that must agree.

What is kept is a tokenizer.json that `transformers` loads, and its ids are the ones that count. Text goes to ids by one of
three ways, which give the same ids (compared on a sample at every build):

compiled   `engine.Engine`: byte-level BPE under a known split pattern; the fastest, after some seconds of compiling, and the
           only one whose memory and time stay linear on any text
tiktoken   byte-level BPE under any split pattern
library    `tokenizers` itself: everything else
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.tokens import engine
from bessemer.tokens.framing import Framing, framing_between
from bessemer.tokens.patterns import GPT4
from bessemer.tokens.pieces import byte_alphabet, changes, kind_of, prefix_of, token_pieces

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as HuggingFaceTokenizer

Ids = npt.NDArray[np.uint32]
Way = Literal["compiled", "tiktoken", "library"]

LONG_CHARACTERS = 1_000_000  # longer texts do not go through tiktoken
SPACES_CHARACTERS = 50_000  # nor such with a longer run of white space: its regex engine overflows at about a million
_ENDS = re.compile(r"end|eos|eot|sep|^</s>$", re.IGNORECASE)  # names of tokens that may end a text
BATCH_TEXTS = 64  # texts that a thread takes at one time


def mask_token(recipe: Recipe) -> str | None:
    """The mask token that a recipe's tokenizer must have; None when nothing is masked."""
    return recipe.tokenizer.mask_token if recipe.train.objective == "masked" else None


class Tokenizer:
    """Text to ids and back; immutable. mask_token: the id that stands where a token is hidden; None: not asked for."""

    def __init__(self, inner: HuggingFaceTokenizer, end_of_text: str, mask_token: str | None = None) -> None:
        self._inner = inner
        # `transformers` cuts and pads by its caller's word, not by what a tokenizer.json was saved with.
        inner.no_truncation()
        inner.no_padding()
        found = inner.token_to_id(end_of_text)
        if found is None:
            special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
            ends = [name for name in special if _ENDS.search(name)] or special
            raise InputError(
                f"tokenizer.end_of_text: the tokenizer has no token {end_of_text!r}; name the one that ends a text"
                + (f", such as {', '.join(map(repr, ends[:5]))}" if ends else "; it has no special tokens")
            )
        self.end_of_text: int = found
        self.end_of_text_token = end_of_text
        self.mask_token: int | None = None
        if mask_token is not None:
            self.require([mask_token], "mask_token")
            self.mask_token = inner.token_to_id(mask_token)
        self.vocabulary: int = max(inner.get_vocab().values()) + 1
        self._description: dict[str, Any] = json.loads(inner.to_str())
        if self._description["model"].get("dropout"):
            raise InputError(
                "tokenizer.path: its BPE has dropout, so that the same text gives other ids each time; set model.dropout "
                "to null in the file"
            )
        self._shape = engine.shape_of(self._description)
        self._fast = _tiktoken_of(self._description, self._shape)
        self.way: Way = "tiktoken" if self._fast is not None else "library"

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocabulary: int,
        end_of_text: str,
        mask_token: str | None = None,
        special_tokens: Sequence[str] = (),
        regex: str = GPT4.regex,
        prefix_space: bool = False,
    ) -> Tokenizer:
        """Train a byte-level BPE of `vocabulary` ids.

        The first ids are end-of-text, `special_tokens` in their order and the mask token if any, whatever the text; then
        256 bytes, then merges. regex: what text is cut by; prefix_space: a space is put before every text.
        """
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        inner = HuggingFaceTokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(regex), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        if prefix_space:
            inner.normalizer = normalizers.Prepend(" ")
            inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
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
            more = f" and {len(special) - 2} others" if len(special) > 2 else ""
            raise InputError(
                f"tokenizer.vocabulary: {vocabulary} ids do not hold the 256 bytes, {end_of_text!r} and {special[-1]!r}{more}; "
                f"give {tokenizer.vocabulary} or more"
            )
        if tokenizer.vocabulary < vocabulary:
            raise InputError(
                f"tokenizer.vocabulary: {vocabulary} ids were asked for, but the text supports only "
                f"{tokenizer.vocabulary} (no pair of tokens is left to merge); lower it or add text"
            )
        return tokenizer

    @classmethod
    def load(cls, path: Path, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Load a tokenizer.json; it must have the named special tokens."""
        return cls(_read(path), end_of_text, mask_token)

    @classmethod
    def load_any(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json only to encode with it: any of its special tokens stands for end-of-text."""
        inner = _read(path)
        special = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
        return cls(inner, special[0] if special else next(iter(inner.get_vocab())))

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self._inner.to_str(pretty=True))

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json without its post-processor, which adds tokens around a text and changes none of it: an
        exported tokenizer is the one that the run was trained with."""
        text = self.to_json()
        if self._description.get("post_processor") is not None:
            from tokenizers import Tokenizer as HuggingFaceTokenizer

            bare = {**self._description, "post_processor": None}
            text = str(HuggingFaceTokenizer.from_str(json.dumps(bare)).to_str(pretty=True))
        return hashlib.sha256(text.encode()).hexdigest()

    def require(self, tokens: Sequence[str], key: str) -> None:
        """Raises InputError when one of these is not a special token; key: of the recipe's tokenizer table."""
        special = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        for token in tokens:
            if token not in special:
                raise InputError(
                    f"tokenizer.{key}: the tokenizer has no special token {token!r}; name the one it uses; it has "
                    + ", ".join(repr(name) for name in sorted(special)[:12])
                )

    def encode(self, text: str) -> list[int]:
        """Ids of a text; text that looks like a special token is text."""
        return [int(token) for token in self._encoded([text], -1)[0]]

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens stand for themselves, as a chat template writes them."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def id_of(self, token: str) -> int | None:
        """The id of a token; None where there is none of this name."""
        found = self._inner.token_to_id(token)
        return None if found is None else int(found)

    @property
    def framing(self) -> Framing:
        """The ids that the tokenizer.json puts around a text."""
        plain, whole = (self._inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        return framing_between(plain, whole) or Framing()

    @property
    def special(self) -> dict[int, str]:
        """Special tokens by their ids."""
        return {
            number: token.content for number, token in self._inner.get_added_tokens_decoder().items() if token.special
        }

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, end-of-text appended, in order, by the tokenizer's way; threads may call it side by side."""
        return self._encoded(texts, self.end_of_text)

    def encode_documents(self, texts: Sequence[str], threads: int) -> list[Ids]:
        """As `encode_batch`, in so many threads; the result does not depend on their number."""
        batches = [texts[start : start + BATCH_TEXTS] for start in range(0, len(texts), BATCH_TEXTS)]
        with ThreadPoolExecutor(threads) as pool:
            return [ids for batch in pool.map(self.encode_batch, batches) for ids in batch]

    def _encoded(self, texts: Sequence[str], end: int) -> list[Ids]:
        """end: the id to append; -1: none."""
        if self.way == "compiled":
            assert self.engine is not None
            return [ids.view(np.uint32) for ids in self.engine.encode([text.encode() for text in texts], end)]
        if self.way == "library" or self._fast is None:
            return self._by_library(texts, end)
        found: list[Ids] = []
        prefix = " " if self._shape is not None and self._shape.prefix_space else ""
        for text in texts:
            if _too_long(text):
                other = self.engine
                found += self._by_library([text], end) if other is None else (
                    [ids.view(np.uint32) for ids in other.encode([text.encode()], end)]
                )  # fmt: skip
            else:
                ids = self._fast.encode_to_numpy(prefix + text if text else text, disallowed_special=())
                found.append(np.append(ids, np.uint32(end)) if end >= 0 else ids)
        return found

    def _by_library(self, texts: Sequence[str], end: int) -> list[Ids]:
        tail = [end] if end >= 0 else []
        encodings = self._ordinary.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, *tail], dtype=np.uint32) for encoding in encodings]

    @cached_property
    def engine(self) -> engine.Engine | None:
        """The compiled way, where this tokenizer has one."""
        return engine.build(self._description, self._shape) if self._shape is not None else None

    @cached_property
    def _ordinary(self) -> HuggingFaceTokenizer:
        """A copy in which text that looks like a special token is text: a setting of the whole object, so not for threads
        to change."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        inner = HuggingFaceTokenizer.from_str(self._inner.to_str())
        inner.encode_special_tokens = True
        return inner

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, bytes that are not UTF-8 become replacement characters."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def agrees(self, texts: Iterable[str]) -> bool:
        """Whether this way and the tokenizer.json give the same ids on these texts."""
        sample = list(texts)
        if self.way == "library":
            return True
        ours, theirs = self._encoded(sample, -1), self._by_library(sample, -1)
        return all(np.array_equal(left, right) for left, right in zip(ours, theirs, strict=True))

    def by(self, way: Way) -> Tokenizer:
        """The same tokenizer, encoding by another way. Raises ValueError where it has no such way."""
        if (way == "tiktoken" and self._fast is None) or (way == "compiled" and self.engine is None):
            raise ValueError(f"this tokenizer cannot be encoded by {way}")
        other = Tokenizer.__new__(Tokenizer)
        other.__dict__ = {**self.__dict__, "way": way}
        return other

    def slowed(self) -> Tokenizer:
        """The same tokenizer, encoding only through its tokenizer.json."""
        return self.by("library")

    def token_pieces(self) -> list[bytes]:
        """The bytes each id stands for; none for special tokens. What that means for each kind: `pieces`."""
        return token_pieces(self._description, self._inner.get_vocab(), set(self.special))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """How many bytes of text each id stands for; 0 for special tokens."""
        return np.array([len(piece) for piece in self.token_pieces()], dtype=np.int64)

    @property
    def kind(self) -> str:
        """byte-level, bpe, unigram, wordpiece or wordlevel."""
        return kind_of(self._description)

    @property
    def changes(self) -> list[str]:
        """What the tokenizer does to text before it is cut, such as nfc or lowercase; empty: nothing."""
        return changes(self._description)

    @property
    def text_prefix(self) -> bytes:
        """What the tokenizer puts before every text, which its first token then stands for too."""
        return prefix_of(self._description)

    @property
    def unknown_token(self) -> int | None:
        """The id of what the vocabulary cannot say; None where there is no such text."""
        found = self._description["model"].get("unk_token")
        if found is None and self._description["model"].get("unk_id") is not None:
            return int(self._description["model"]["unk_id"])
        return None if found is None else self._inner.token_to_id(found)

    @property
    def is_byte_level(self) -> bool:
        """Whether each character of a token stands for one byte, so that bytes can be counted by token."""
        return self.kind == "byte-level"


def _read(path: Path) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    if not path.exists():
        raise InputError(f"{path}: no such tokenizer file")
    try:
        return HuggingFaceTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: not a tokenizer.json: {error}") from None


def _too_long(text: str) -> bool:
    """Whether a text is not for tiktoken: very long, or with a very long run of white space."""
    if len(text) <= SPACES_CHARACTERS:
        return False
    return len(text) > LONG_CHARACTERS or any(
        found.end() - found.start() > SPACES_CHARACTERS for found in re.finditer(r"\s+", text)
    )


def _tiktoken_of(description: dict[str, Any], shape: engine.Shape | None) -> tiktoken.Encoding | None:
    """The same vocabulary as a tiktoken encoding, when it is a byte-level BPE that tiktoken can express.

    tiktoken merges the pair with the lowest rank, a tokenizer.json the pair that stands first in its merges; both
    are the same when each merge's result has a higher id than the one before.
    """
    if shape is None or shape.digits_first:
        return None
    model = description["model"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    results = [model["vocab"]["".join(merge)] for merge in merges]
    byte_of = byte_alphabet()
    special = {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = {token: number for token, number in model["vocab"].items() if token not in special}
    strange = any(character not in byte_of for token in tokens for character in token)
    if strange or any(later <= earlier for earlier, later in itertools.pairwise(results)):
        return None
    import tiktoken

    ranks = {bytes(byte_of[character] for character in token): number for token, number in tokens.items()}
    try:
        return tiktoken.Encoding("bessemer", pat_str=shape.regex, mergeable_ranks=ranks, special_tokens=special)
    except ValueError:  # a regular expression that only the tokenizer.json's engine knows
        return None
