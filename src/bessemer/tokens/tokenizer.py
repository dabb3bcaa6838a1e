"""The byte-level BPE tokenizer: trained, loaded, and the ways through it that must agree.

What is kept is a tokenizer.json that `transformers` loads. Encoding goes through tiktoken where the vocabulary is a
plain byte-level BPE, since it is three times as fast and gives the same ids (checked on a sample at every start).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as HuggingFaceTokenizer

# The split pattern of GPT-4's cl100k_base (openai/tiktoken, tiktoken_ext/openai_public.py), with the possessive
# quantifiers written plainly, since not every regex engine has them: words with one leading non-letter, numbers in
# groups of three digits, punctuation with its line ends, and runs of white space that leave one space to the word.
GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to ids and back; immutable. mask_token: the id that stands where a token is hidden; None: not asked for."""

    def __init__(self, inner: HuggingFaceTokenizer, end_of_text: str, mask_token: str | None = None) -> None:
        self._inner = inner
        found = inner.token_to_id(end_of_text)
        if found is None:
            raise InputError(
                f"tokenizer.end_of_text: the tokenizer has no token {end_of_text!r}; name the one it uses, for example "
                + ", ".join(repr(token.content) for token in list(inner.get_added_tokens_decoder().values())[:5])
            )
        self.end_of_text: int = found
        self.end_of_text_token = end_of_text
        self.mask_token: int | None = None
        if mask_token is not None:
            special = {token.content: number for number, token in inner.get_added_tokens_decoder().items()}
            if mask_token not in special:
                raise InputError(
                    f"tokenizer.mask_token: the tokenizer has no special token {mask_token!r}; name the one it uses; it has "
                    + ", ".join(repr(name) for name in list(special)[:12])
                )
            self.mask_token = special[mask_token]
        self.vocabulary: int = max(inner.get_vocab().values()) + 1
        self._fast = _tiktoken_of(inner)

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int, end_of_text: str, mask_token: str | None = None) -> Tokenizer:
        """Train a byte-level BPE of `vocabulary` ids: end-of-text, the mask token if any, 256 bytes, the rest merges."""
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        inner = HuggingFaceTokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT4_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[end_of_text] if mask_token is None else [end_of_text, mask_token],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        tokenizer = cls(inner, end_of_text, mask_token)
        if tokenizer.vocabulary > vocabulary:
            raise InputError(
                f"tokenizer.vocabulary: {vocabulary} ids do not hold the 256 bytes, {end_of_text!r} and {mask_token!r}; give "
                f"{tokenizer.vocabulary} or more"
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
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        if not path.exists():
            raise InputError(f"{path}: no such tokenizer file")
        try:
            inner = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path}: not a tokenizer.json: {error}") from None
        return cls(inner, end_of_text, mask_token)

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self._inner.to_str(pretty=True))

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; text that looks like a special token is text."""
        if self._fast is not None:
            return list(self._fast.encode_ordinary(text))
        return self._slow(text)

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens stand for themselves, as a chat template writes them."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    @property
    def special(self) -> dict[int, str]:
        """Special tokens by their ids."""
        return {
            number: token.content for number, token in self._inner.get_added_tokens_decoder().items() if token.special
        }

    @property
    def prefix(self) -> list[int]:
        """Ids that the tokenizer itself puts before every text, such as a beginning-of-text token."""
        ids = list(self._inner.encode("a", add_special_tokens=True).ids)
        plain = list(self._inner.encode("a", add_special_tokens=False).ids)
        return ids[: len(ids) - len(plain)] if ids[len(ids) - len(plain) :] == plain else []

    def encode_documents(self, texts: Sequence[str], threads: int) -> list[npt.NDArray[np.uint32]]:
        """Ids of each text, end-of-text appended, in order; the result does not depend on the number of threads."""
        if self._fast is not None:
            encoded = self._fast.encode_ordinary_batch(list(texts), num_threads=threads)
        else:
            encoded = [self._slow(text) for text in texts]
        return [np.array([*ids, self.end_of_text], dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, bytes that are not UTF-8 become replacement characters."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def agrees(self, texts: Iterable[str]) -> bool:
        """Whether the fast way and the tokenizer.json give the same ids on these texts."""
        return self._fast is None or all(self._fast.encode_ordinary(text) == self._slow(text) for text in texts)

    def slowed(self) -> Tokenizer:
        """The same tokenizer, encoding only through its tokenizer.json."""
        plain = Tokenizer.__new__(Tokenizer)
        plain.__dict__ = {**self.__dict__, "_fast": None}
        return plain

    def token_pieces(self) -> list[bytes]:
        """The bytes each id stands for; none for special tokens. For byte-level vocabularies."""
        special, byte_of = self._inner.get_added_tokens_decoder(), _byte_alphabet()
        pieces = [b""] * self.vocabulary
        for token, number in self._inner.get_vocab().items():
            if number not in special:
                pieces[number] = bytes(byte_of[character] for character in token)
        return pieces

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """How many bytes of text each id stands for; 0 for special tokens. For byte-level vocabularies."""
        return np.array([len(piece) for piece in self.token_pieces()], dtype=np.int64)

    @property
    def is_byte_level(self) -> bool:
        """Whether each character of a token stands for one byte, so that bytes can be counted by token."""
        return '"type":"ByteLevel"' in self._inner.to_str().replace(" ", "")

    def _slow(self, text: str) -> list[int]:
        # A text may contain the letters of a special token: encode_special_tokens makes it plain text.
        self._inner.encode_special_tokens = True
        try:
            return list(self._inner.encode(text, add_special_tokens=False).ids)
        finally:
            self._inner.encode_special_tokens = False


def _tiktoken_of(inner: HuggingFaceTokenizer) -> tiktoken.Encoding | None:
    """The same vocabulary as a tiktoken encoding, when it is a byte-level BPE that tiktoken can express.

    tiktoken merges the pair with the lowest rank, a tokenizer.json the pair that stands first in its merges; both
    are the same when each merge's result has a higher id than the one before.
    """
    description = json.loads(inner.to_str())
    model, split = description["model"], description.get("pre_tokenizer") or {}
    steps = split.get("pretokenizers", [split])
    pattern = next((step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"), None)
    plain = (
        model.get("type") == "BPE"
        and not model.get("ignore_merges")
        and description.get("normalizer") is None
        and pattern is not None
        and [step.get("type") for step in steps] == ["Split", "ByteLevel"]
        and steps[0].get("behavior") == "Isolated"
        and not steps[0].get("invert")
        and not steps[1].get("add_prefix_space")
        and not steps[1].get("use_regex")
    )
    if not plain:
        return None
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    results = [model["vocab"]["".join(merge)] for merge in merges]
    if any(later <= earlier for earlier, later in itertools.pairwise(results)):
        return None
    import tiktoken

    byte_of = _byte_alphabet()
    special = {token["content"]: token["id"] for token in description["added_tokens"]}
    ranks = {
        bytes(byte_of[character] for character in token): number
        for token, number in model["vocab"].items()
        if token not in special
    }
    return tiktoken.Encoding("bessemer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters: dict[str, int] = {chr(byte): byte for byte in printable}
    others: list[Any] = [byte for byte in range(256) if byte not in printable]
    characters.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return characters
