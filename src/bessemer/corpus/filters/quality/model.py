"""Classifiers that score texts: a linear model, saved as an array and JSON, or a fastText model.

The linear model represents a document by a hashed bag of its distinct words and word pairs, and by ten statistics.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.special import expit

from bessemer.common.errors import InputError
from bessemer.common.hashing import file_sha256
from bessemer.corpus.filters.language import load_model, share_of_label
from bessemer.recipe import Quality
from bessemer.run.files import write_atomic, write_json
from bessemer.text.hashing import Array, hash_ngrams
from bessemer.text.ngrams import folded_words
from bessemer.text.statistics import Statistics

Vector = npt.NDArray[np.float64]

FORMAT = 5  # increase when equal weights would give other scores, as after a change of words, hash or statistics
WEIGHTS, DESCRIPTION = "model.npy", "model.json"
TEXTS_AT_ONCE = 1000
DIGITS = 6  # decimals of a score; further ones differ between processors


@dataclass(frozen=True)
class LinearModel:
    """A calibrated logistic regression over hashed words, word pairs and statistics.

    Attributes:
        read_bytes: Number of bytes at the beginning of a text that the model reads.
        hash_bits: Logarithm to base 2 of the number of hash buckets for words and word pairs.
        bias: Bias of the logit.
        weights: Weight of each feature, (2^hash_bits + NUM_STATISTICS,).
    """

    read_bytes: int
    hash_bits: int
    bias: float
    weights: npt.NDArray[np.float32]

    def score(self, texts: Sequence[str]) -> Vector:
        """Return the probability that each text is of high quality, for equal priors of high and low.

        It is rounded to DIGITS decimals. The summation order is fixed, so that scores do not depend on the batch.
        """
        logits, weights = [np.zeros(0)], self.weights.astype(np.float64)
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            rows = extract(texts[first : first + TEXTS_AT_ONCE], self.read_bytes, self.hash_bits)
            logits.append(self.bias + rows @ weights)
        return np.asarray(np.round(expit(np.concatenate(logits)), DIGITS), dtype=np.float64)

    def save(self, folder: Path) -> None:
        """Write model.npy, then model.json, into an existing folder."""
        buffer = io.BytesIO()
        np.save(buffer, self.weights)
        write_atomic(folder / WEIGHTS, buffer.getvalue())
        numbers = {name: value for name, value in vars(self).items() if name != "weights"}
        write_json(folder / DESCRIPTION, {"format": FORMAT, **numbers, "sha256": file_sha256(folder / WEIGHTS)})

    @classmethod
    def load(cls, folder: Path) -> LinearModel:
        """Load a saved model from its folder or from a run directory, without executing code from the files.

        Raises InputError if the files are missing, damaged or of another version.
        """
        path = description_file(folder)
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            if described["format"] != FORMAT or described["sha256"] != file_sha256(path.with_name(WEIGHTS)):
                raise ValueError(f"the format is not {FORMAT}, or the hash of {WEIGHTS} differs")
            weights = np.load(path.with_name(WEIGHTS), allow_pickle=False)
            return cls(int(described["read_bytes"]), int(described["hash_bits"]), float(described["bias"]), weights)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"corpus.quality.model: {path} is not a classifier of this version: {error}; train it again"
            ) from None


@dataclass(frozen=True)
class FastTextModel:
    """A supervised fastText model, such as DCLM's. The score is the probability of one label.

    Attributes:
        label: This label.
        read_bytes: Number of bytes at the beginning of a text that the model reads.
        model: The loaded fastText model.
    """

    label: str
    read_bytes: int
    model: Any

    def score(self, texts: Sequence[str]) -> Vector:
        """Return the label's probability for each text, with line breaks read as spaces."""
        lines = (prefix(text, self.read_bytes).replace("\n", " ") for text in texts)
        shares = np.array([share_of_label(self.model, line, self.label) for line in lines], dtype=np.float64)
        # fastText sometimes returns 1.00001.
        return np.asarray(np.round(np.clip(shares, 0.0, 1.0), DIGITS), dtype=np.float64)

    @classmethod
    def load(cls, path: Path, label: str, read_bytes: int) -> FastTextModel:
        """Load a .bin or .ftz file. Raises InputError if it is unreadable or lacks the label."""
        model = load_model(str(path), "corpus.quality.model")
        labels, _ = model.predict("the", k=-1, threshold=0.0)
        if label not in labels:
            shown = ", ".join(sorted(labels)[:8])
            raise InputError(f"corpus.quality.label: {path.name} has no label {label!r}; its labels are: {shown}")
        return cls(label, read_bytes, model)


Classifier: TypeAlias = LinearModel | FastTextModel


def open_model(settings: Quality) -> Classifier:
    """Load the trained classifier that `settings.model` names."""
    path = Path(settings.model or "").expanduser()
    if settings.kind == "fasttext":
        return FastTextModel.load(path, settings.label, settings.read_bytes)
    return LinearModel.load(path)


def description_file(folder: Path) -> Path:
    """Return the path of model.json in a run directory or in the folder of a saved model."""
    inner = folder / "corpus" / "quality" / DESCRIPTION
    return inner if inner.exists() else folder / DESCRIPTION


def model_sha256(settings: Quality) -> str:
    """Return the SHA-256 of the classifier that a recipe names, because the corpus depends on it; "" if it names none.

    Returns the path instead if there is no such file, whose loading later raises an error.
    """
    if settings.model is None:
        return ""
    path = Path(settings.model).expanduser()
    path = description_file(path) if settings.kind == "linear" else path
    return file_sha256(path) if path.is_file() else str(path)


# --- Features of documents

NUM_STATISTICS = 10
STATISTICS_SCALE = 0.3  # keeps the statistics small compared with the unit-length bag of words


def extract(texts: Sequence[str], read_bytes: int, hash_bits: int) -> csr_array:
    """Return the features of the first `read_bytes` bytes of each text, shape (texts, 2^hash_bits + NUM_STATISTICS).

    The first columns are hash buckets of words and word pairs. Each bucket that occurs has the value 1 / sqrt(number of
    occurring buckets), so that this part has length 1 for any text. The last columns are statistics of the text.
    """
    columns, values, ends = [np.zeros(0, dtype=np.int32)], [np.zeros(0)], [0]
    last = np.arange(1 << hash_bits, (1 << hash_bits) + NUM_STATISTICS, dtype=np.int32)
    for text in texts:
        text = prefix(text, read_bytes)
        buckets = buckets_of(folded_words(text)[0], hash_bits)
        count = len(buckets)
        columns += [buckets, last]
        values += [np.full(count, 1 / np.sqrt(max(count, 1))), np.multiply(STATISTICS_SCALE, _statistics(text))]
        ends.append(ends[-1] + count + NUM_STATISTICS)
    shape = (len(texts), (1 << hash_bits) + NUM_STATISTICS)
    return csr_array((np.concatenate(values), np.concatenate(columns), ends), shape=shape)


def _statistics(text: str) -> tuple[float, ...]:
    """Return NUM_STATISTICS statistics of a text, in fixed order.

    They are the shares of kinds of characters (such as digits and punctuation) and kinds of lines (such as short and
    repeated ones), and the logarithms of the text length and of the mean line length, divided by 10.
    """
    counts = Statistics(text)
    characters, lines = counts.characters, counts.lines
    visible, num_lines = max(characters.total - characters.white_space, 1), max(lines.total, 1)
    return (
        characters.alphabetic / visible,
        characters.decimal / visible,
        characters.punctuation / visible,
        characters.upper / max(characters.alphabetic, 1),
        characters.white_space / max(characters.total, 1),
        lines.terminal / num_lines,
        counts.num_short_lines(30) / num_lines,
        lines.duplicates / num_lines,
        np.log1p(characters.total) / 10,
        np.log1p(lines.characters / num_lines) / 10,
    )


def prefix(text: str, num_bytes: int) -> str:
    """Return the longest beginning of a text that fits in `num_bytes` bytes of UTF-8."""
    if 4 * len(text) <= num_bytes:
        return text
    return text[:num_bytes].encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore")


def buckets_of(words: Array, hash_bits: int) -> Array:
    """Return the distinct hash buckets of words and of pairs of adjacent words, in the order of their first occurrence.

    `words` are the 64-bit hashes of a text's words. There are 2^hash_bits buckets.
    """
    pairs = np.empty_like(words)
    pairs = pairs[: hash_ngrams(words, len(words), 2, pairs)]
    buckets = (np.concatenate([words, pairs]) >> np.uint64(64 - hash_bits)).astype(np.int32)
    return buckets[np.sort(np.unique(buckets, return_index=True)[1])]
