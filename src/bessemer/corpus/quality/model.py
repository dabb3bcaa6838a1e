"""A classifier that is ready to score: the linear one, saved as plain arrays and JSON, or a fastText model."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.features import STATISTICS, STOP_WORDS, Texts, stop_words
from bessemer.corpus.quality.logistic import CLIP, sigmoid
from bessemer.errors import InputError
from bessemer.recipe import Quality
from bessemer.run import write_atomic, write_json

FORMAT = 1
"""Goes up when the same weights would give another score: with the words, the hash or the statistics."""

ARRAYS, DESCRIPTION = "model.npz", "model.json"

LARGEST_BYTES = 1 << 28
"""A model.npz that unpacks to more is refused: 2^24 buckets take 64 MiB."""

DIGITS = 6
"""Decimals of a score: what is beyond differs between processors, and no decision is to hang on it."""


class Classifier(Protocol):
    """What scoring needs: a probability of being high for each text."""

    def score(self, texts: Texts) -> npt.NDArray[np.float64]: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LinearModel:
    """A calibrated logistic regression over statistics and hashed words."""

    read_bytes: int
    hash_bits: int
    centre: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]
    bias: float
    of_statistics: npt.NDArray[np.float64]
    of_buckets: npt.NDArray[np.float32]
    slope: float = 1.0
    offset: float = 0.0
    """Platt's: the score is sigmoid(slope x logit + offset)."""

    def logits(self, texts: Texts) -> npt.NDArray[np.float64]:
        """The linear model's values, before calibration."""
        from bessemer.corpus.quality import kernels

        out = np.empty(len(texts), dtype=np.float64)
        kernels.score(
            texts.data, texts.starts, texts.ends, self.read_bytes, self.hash_bits, stop_words(), self.centre,
            self.spread, CLIP, self.bias, self.of_statistics, self.of_buckets, out,
        )  # fmt: skip
        return out

    def score(self, texts: Texts) -> npt.NDArray[np.float64]:
        """The probability that each text is high, were there as many high ones as low ones; DIGITS decimals."""
        scores = sigmoid(self.slope * self.logits(texts) + self.offset)
        return np.asarray(np.round(scores, DIGITS), dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """For quality.json."""
        return {"kind": "linear", "read_bytes": self.read_bytes, "buckets": 1 << self.hash_bits}

    def save(self, folder: Path) -> None:
        """Write model.npz and model.json into a folder that exists, the arrays first."""
        buffer = io.BytesIO()
        np.savez(
            buffer, centre=self.centre, spread=self.spread, of_statistics=self.of_statistics, of_buckets=self.of_buckets
        )
        raw = buffer.getvalue()
        write_atomic(folder / ARRAYS, raw)
        write_json(
            folder / DESCRIPTION,
            {
                "format": FORMAT,
                "kind": "linear",
                "read_bytes": self.read_bytes,
                "hash_bits": self.hash_bits,
                "bias": self.bias,
                "slope": self.slope,
                "offset": self.offset,
                "statistics": list(STATISTICS),
                "stop_words": list(STOP_WORDS),
                "sha256": hashlib.sha256(raw).hexdigest(),
            },
        )

    @classmethod
    def load(cls, folder: Path) -> LinearModel:
        """Read what `save` wrote; a run folder stands for its corpus/quality. Nothing in the files is executed.

        Raises InputError for a folder that holds no model, or one that is damaged or of another format.
        """
        inner = folder / "corpus" / "quality"
        folder = inner if (inner / DESCRIPTION).exists() else folder
        try:
            said: Any = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            raw = (folder / ARRAYS).read_bytes()
        except ValueError as error:
            raise InputError(f"corpus.quality.model: {folder / DESCRIPTION} is damaged: {error}") from None
        except OSError:
            raise InputError(
                f"corpus.quality.model: {folder}: no {DESCRIPTION} with {ARRAYS} there; name a run folder whose "
                "corpus trained a classifier, or the folder of a saved one"
            ) from None
        what = f"corpus.quality.model: {folder / DESCRIPTION}"
        if not isinstance(said, dict) or said.get("format") != FORMAT or said.get("statistics") != list(STATISTICS):
            raise InputError(f"{what} is not a linear model of format {FORMAT}; train it again with this version")
        if hashlib.sha256(raw).hexdigest() != said.get("sha256"):
            raise InputError(
                f"corpus.quality.model: {folder / ARRAYS} is damaged: its hash is not the one in {DESCRIPTION}"
            )
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > LARGEST_BYTES:
                    raise InputError(f"corpus.quality.model: {folder / ARRAYS} unpacks to over {LARGEST_BYTES} bytes")
            with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
                model = cls(
                    int(said["read_bytes"]), int(said["hash_bits"]), arrays["centre"].astype(np.float64),
                    arrays["spread"].astype(np.float64), float(said["bias"]), arrays["of_statistics"].astype(np.float64),
                    arrays["of_buckets"].astype(np.float32), float(said["slope"]), float(said["offset"]),
                )  # fmt: skip
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(f"{what}: cannot be read as a model: {error}; train it again") from None
        model._check(what)
        return model

    def _check(self, what: str) -> None:
        few = (len(STATISTICS),)
        whole = self.centre.shape == self.spread.shape == self.of_statistics.shape == few
        if not whole or not 8 <= self.hash_bits <= 24 or self.of_buckets.shape != (1 << self.hash_bits,):
            raise InputError(f"{what}: the arrays have the wrong shapes; train it again")
        numbers = (self.centre, self.spread, self.of_statistics, self.of_buckets)
        plain = np.array([self.bias, self.slope, self.offset])
        if not all(np.isfinite(values).all() for values in (*numbers, plain)) or not (self.spread > 0).all():
            raise InputError(f"{what}: a weight is not a finite number; train it again")
        if self.read_bytes < 1:
            raise InputError(f"{what}: read_bytes is {self.read_bytes}; train it again")


@dataclass(frozen=True)
class FastTextModel:
    """A supervised fastText model, such as DCLM's; the score is the probability of one label.

    fastText parses the file in C++: use one from a place you trust.
    """

    path: Path
    label: str
    read_bytes: int
    model: Any

    def score(self, texts: Texts) -> npt.NDArray[np.float64]:
        """The label's probability for each text, its line breaks read as spaces."""
        out = np.zeros(len(texts))
        for number in range(len(texts)):
            line = texts.text(number, self.read_bytes).decode("utf-8", "replace").replace("\n", " ")
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
