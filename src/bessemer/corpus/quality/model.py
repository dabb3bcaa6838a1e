"""A classifier that is ready to score: the linear one, saved as plain arrays and JSON, or a fastText model."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from bessemer.corpus.language import load_model
from bessemer.corpus.quality.features import STATISTICS, extract, prefix, standardised
from bessemer.corpus.quality.scores import Vector
from bessemer.errors import InputError
from bessemer.hashing import file_sha256
from bessemer.recipe import Quality
from bessemer.run import write_atomic, write_json

FORMAT = 4  # goes up when the same weights would give another score: with the words, the hash or the statistics
ARRAYS, DESCRIPTION = "model.npz", "model.json"
ARRAY_NAMES = ("centre", "spread", "statistic_weights", "bucket_weights")
MAX_BYTES = 1 << 28  # a model.npz that unpacks to more is refused: 2^24 buckets take 64 MiB
TEXTS_AT_ONCE = 1000
DIGITS = 6  # decimals of a score: what is beyond differs between processors, and no decision is to hang on it


@dataclass(frozen=True)
class LinearModel:
    """A logistic regression over statistics and hashed words."""

    read_bytes: int
    hash_bits: int
    centre: Vector
    spread: Vector
    bias: float
    statistic_weights: Vector
    bucket_weights: npt.NDArray[np.float32]

    def logits(self, texts: Sequence[str]) -> Vector:
        """Logits, each summed in a fixed order, independent of the batch."""
        found, weights = [np.zeros(0)], self.bucket_weights.astype(np.float64)
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            features = extract(texts[first : first + TEXTS_AT_ONCE], self.read_bytes, self.hash_bits)
            statistics = standardised(features.statistics, self.centre, self.spread) * self.statistic_weights
            found.append(self.bias + statistics.sum(axis=1) + features.bag @ weights)
        return np.concatenate(found)

    def score(self, texts: Sequence[str]) -> Vector:
        """The probability that each text is high, were there as many high ones as low ones; DIGITS decimals."""
        return np.asarray(np.round(expit(self.logits(texts)), DIGITS), dtype=np.float64)

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
        facts = {"statistics": list(STATISTICS), "sha256": hashlib.sha256(raw).hexdigest()}
        write_json(folder / DESCRIPTION, {"format": FORMAT, "kind": "linear", **numbers, **facts})

    @classmethod
    def load(cls, folder: Path) -> LinearModel:
        """Read a saved model; `folder` may be a run folder. Nothing in the files is executed. Raises InputError."""
        described_in = description_file(folder)
        what = f"corpus.quality.model: {described_in}"
        try:
            described: Any = json.loads(described_in.read_text(encoding="utf-8"))
            raw = described_in.with_name(ARRAYS).read_bytes()
        except ValueError as error:
            raise InputError(f"{what} is damaged: {error}") from None
        except OSError:
            raise InputError(
                f"corpus.quality.model: {described_in.parent}: no {DESCRIPTION} with {ARRAYS} there; name a run folder whose "
                "corpus trained a classifier, or the folder of a saved one"
            ) from None
        is_known = isinstance(described, dict) and described.get("format") == FORMAT
        if not is_known or described.get("statistics") != list(STATISTICS):
            raise InputError(f"{what} is not a linear model of format {FORMAT}; train it again with this version")
        if hashlib.sha256(raw).hexdigest() != described.get("sha256"):
            raise InputError(f"{what}: {ARRAYS} is damaged: its hash is not the one in {DESCRIPTION}")
        try:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                    raise InputError(f"{what}: {ARRAYS} unpacks to over {MAX_BYTES} bytes")
            with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
                values: dict[str, Any] = {name: arrays[name].astype(np.float64) for name in ARRAY_NAMES}
            values["bucket_weights"] = values["bucket_weights"].astype(np.float32)
            values |= {name: int(described[name]) for name in ("read_bytes", "hash_bits")}
            values["bias"] = float(described["bias"])
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(f"{what}: cannot be read as a model: {error}; train it again") from None
        shapes = [values[name].shape for name in ARRAY_NAMES]
        if shapes != [(len(STATISTICS),)] * 3 + [(1 << values["hash_bits"],)]:
            raise InputError(f"{what}: the arrays have the wrong shapes; train it again")
        if not all(np.isfinite(value).all() for value in values.values()) or not (values["spread"] > 0).all():
            raise InputError(f"{what}: a weight is not a finite number; train it again")
        return cls(**values)


@dataclass(frozen=True)
class FastTextModel:
    """A supervised fastText model, such as DCLM's; the score is the probability of one label."""

    path: Path
    label: str
    read_bytes: int
    model: Any

    def score(self, texts: Sequence[str]) -> Vector:
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
        model = load_model(str(path), "corpus.quality.model")
        labels, _ = model.predict("the", k=-1, threshold=0.0)
        if label not in labels:
            shown = ", ".join(sorted(labels)[:8])
            raise InputError(f"corpus.quality.label: {path.name} has no label {label!r}; it has: {shown}")
        return cls(path, label, read_bytes, model)


Classifier: TypeAlias = LinearModel | FastTextModel


def open_model(settings: Quality) -> Classifier:
    """The trained classifier that `settings.model` names."""
    path = Path(settings.model or "").expanduser()
    if settings.kind == "fasttext":
        return FastTextModel.load(path, settings.label, settings.read_bytes)
    return LinearModel.load(path)


def description_file(folder: Path) -> Path:
    """model.json of a run folder, or of the folder of a saved model."""
    inner = folder / "corpus" / "quality" / DESCRIPTION
    return inner if inner.exists() else folder / DESCRIPTION


def model_sha256(settings: Quality) -> str:
    """The SHA-256 of the classifier that a recipe names, so that another one makes another corpus; "" for none."""
    if settings.model is None:
        return ""
    path = Path(settings.model).expanduser()
    path = description_file(path) if settings.kind == "linear" else path
    if not path.is_file():
        return json.dumps(str(path))
    return file_sha256(path)
