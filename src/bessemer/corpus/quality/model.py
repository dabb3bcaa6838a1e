"""A classifier that is ready to score: the linear one, saved as plain arrays and JSON, or a fastText model."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from bessemer.corpus.quality.features import STATISTICS, extract, prefix, standardised
from bessemer.errors import InputError
from bessemer.recipe import Quality
from bessemer.run import write_atomic, write_json

FORMAT = 2
"""Goes up when the same weights would give another score: with the words, the hash or the statistics."""

ARRAYS, DESCRIPTION = "model.npz", "model.json"
ARRAY_NAMES = ("centre", "spread", "statistic_weights", "bucket_weights")

MAX_BYTES = 1 << 28
"""A model.npz that unpacks to more is refused: 2^24 buckets take 64 MiB."""

TEXTS_AT_ONCE = 1000

DIGITS = 6
"""Decimals of a score: what is beyond differs between processors, and no decision is to hang on it."""


class Classifier(Protocol):
    """What scoring needs: a probability of being high for each text."""

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float64]: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LinearModel:
    """A calibrated logistic regression over statistics and hashed words."""

    read_bytes: int
    hash_bits: int
    centre: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]
    bias: float
    statistic_weights: npt.NDArray[np.float64]
    bucket_weights: npt.NDArray[np.float32]
    slope: float = 1.0
    offset: float = 0.0
    """Platt's: the score is expit(slope x logit + offset)."""

    def logits(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Logits before calibration, each summed in a fixed order, independent of the batch."""
        found, weights = [np.zeros(0)], self.bucket_weights.astype(np.float64)
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            features = extract(texts[first : first + TEXTS_AT_ONCE], self.read_bytes, self.hash_bits)
            statistics = standardised(features.statistics, self.centre, self.spread) * self.statistic_weights
            found.append(self.bias + statistics.sum(axis=1) + features.bag @ weights)
        return np.concatenate(found)

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """The probability that each text is high, were there as many high ones as low ones; DIGITS decimals."""
        return np.asarray(np.round(expit(self.slope * self.logits(texts) + self.offset), DIGITS), dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """For quality.json."""
        return {"kind": "linear", "read_bytes": self.read_bytes, "buckets": 1 << self.hash_bits}

    def save(self, folder: Path) -> None:
        """Write model.npz and model.json into a folder that exists, the arrays first."""
        buffer, values = io.BytesIO(), vars(self)
        np.savez(buffer, **{name: values[name] for name in ARRAY_NAMES})
        raw = buffer.getvalue()
        write_atomic(folder / ARRAYS, raw)
        numbers = {name: value for name, value in values.items() if name not in ARRAY_NAMES}
        digest = hashlib.sha256(raw).hexdigest()
        statistics = {"statistics": list(STATISTICS)}
        write_json(
            folder / DESCRIPTION, {"format": FORMAT, "kind": "linear", **numbers, **statistics, "sha256": digest}
        )

    @classmethod
    def load(cls, folder: Path) -> LinearModel:
        """Read a saved model; `folder` may be a run folder. Nothing in the files is executed. Raises InputError."""
        inner = folder / "corpus" / "quality"
        folder = inner if (inner / DESCRIPTION).exists() else folder
        what, arrays_file = f"corpus.quality.model: {folder / DESCRIPTION}", f"corpus.quality.model: {folder / ARRAYS}"
        try:
            described: Any = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            raw = (folder / ARRAYS).read_bytes()
        except ValueError as error:
            raise InputError(f"{what} is damaged: {error}") from None
        except OSError:
            raise InputError(
                f"corpus.quality.model: {folder}: no {DESCRIPTION} with {ARRAYS} there; name a run folder whose "
                "corpus trained a classifier, or the folder of a saved one"
            ) from None
        same = isinstance(described, dict) and described.get("format") == FORMAT
        if not same or described.get("statistics") != list(STATISTICS):
            raise InputError(f"{what} is not a linear model of format {FORMAT}; train it again with this version")
        if hashlib.sha256(raw).hexdigest() != described.get("sha256"):
            raise InputError(f"{arrays_file} is damaged: its hash is not the one in {DESCRIPTION}")
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                    raise InputError(f"{arrays_file} unpacks to over {MAX_BYTES} bytes")
            with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
                centre, spread, statistic_weights = (arrays[name].astype(np.float64) for name in ARRAY_NAMES[:3])
                read_bytes, hash_bits = (int(described[name]) for name in ("read_bytes", "hash_bits"))
                bias, slope, offset = (float(described[name]) for name in ("bias", "slope", "offset"))
                bucket_weights = arrays["bucket_weights"].astype(np.float32)
            model = cls(read_bytes, hash_bits, centre, spread, bias, statistic_weights, bucket_weights, slope, offset)
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(f"{what}: cannot be read as a model: {error}; train it again") from None
        model._check(what)
        return model

    def _check(self, what: str) -> None:
        values = vars(self)
        shapes = [values[name].shape for name in ARRAY_NAMES]
        if shapes != [(len(STATISTICS),)] * 3 + [(1 << self.hash_bits,)] or not 8 <= self.hash_bits <= 24:
            raise InputError(f"{what}: the arrays have the wrong shapes; train it again")
        if not all(np.isfinite(value).all() for value in values.values()) or not (self.spread > 0).all():
            raise InputError(f"{what}: a weight is not a finite number; train it again")
        if self.read_bytes < 1:
            raise InputError(f"{what}: read_bytes is {self.read_bytes}; train it again")


@dataclass(frozen=True)
class FastTextModel:
    """A supervised fastText model, such as DCLM's; the score is the probability of one label. fastText parses the file
    in C++: use only trusted files."""

    path: Path
    label: str
    read_bytes: int
    model: Any

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """The label's probability for each text, its line breaks read as spaces."""
        out = np.zeros(len(texts))
        for number, text in enumerate(texts):
            line = prefix(text, self.read_bytes).replace("\n", " ")
            labels, shares = self.model.predict(line, k=-1, threshold=0.0)
            out[number] = dict(zip(labels, shares, strict=True)).get(self.label, 0.0)
        # fastText gives 1.00001 now and then.
        return np.asarray(np.round(np.clip(out, 0.0, 1.0), DIGITS), dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """For quality.json."""
        return {"kind": "fasttext", "file": self.path.name, "label": self.label, "read_bytes": self.read_bytes}

    @classmethod
    def load(cls, path: Path, label: str, read_bytes: int) -> FastTextModel:
        """Open a .bin or .ftz file. Raises InputError for what is none, or has not the label."""
        try:
            import fasttext
        except ImportError:
            raise InputError(
                "corpus.quality.kind: a fastText model needs fasttext-predict; install it with: "
                "pip install 'bessemer[corpus]'"
            ) from None
        if not path.is_file():
            raise InputError(f"corpus.quality.model: {path}: no such file; name a fastText .bin or .ftz file")
        try:
            model = fasttext.load_model(str(path))
            labels, _ = model.predict("the", k=-1, threshold=0.0)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise InputError(f"corpus.quality.model: {path}: not a supervised fastText model: {error}") from None
        if label not in labels:
            shown = ", ".join(sorted(labels)[:8])
            raise InputError(f"corpus.quality.label: {path.name} has no label {label!r}; it has: {shown}")
        return cls(path, label, read_bytes, model)


def open_model(settings: Quality) -> Classifier:
    """The trained classifier that `settings.model` names."""
    path = Path(settings.model or "").expanduser()
    if settings.kind == "fasttext":
        return FastTextModel.load(path, settings.label, settings.read_bytes)
    return LinearModel.load(path)


def fingerprint(settings: Quality) -> str:
    """The SHA-256 of the classifier that a recipe names, so that another one makes another corpus; "" for none."""
    if settings.model is None:
        return ""
    path = Path(settings.model).expanduser()
    if settings.kind == "linear":
        inner = path / "corpus" / "quality" / DESCRIPTION
        path = inner if inner.exists() else path / DESCRIPTION
    if not path.is_file():
        return json.dumps(str(path))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
