import json

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="the corpus extra is not installed")

from bessemer.studies import STUDIES, bidirectional_vs_causal
from bessemer.studies.base import build
from bessemer.studies.bidirectional_vs_causal import _answers, _rescored
from bessemer.tokens.shards import TokenStore
from bessemer.train.trainer import Trainer
from tests.studies.test_library import TINY

pytestmark = pytest.mark.long

VOCABULARY = 512


def stirred(causal: bool) -> Trainer:
    recipe = TINY.recipe("causal" if causal else "masked", "qwen3" if causal else "modernbert")
    config = TINY.config(VOCABULARY, causal)
    manifest = {"tokenizer": {"vocabulary": VOCABULARY, "end_of_text": 0, "mask_token": 1}}
    trainer = build(recipe, config, TokenStore(None, manifest).end_of_text)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return trainer


def texts(rows: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(2, VOCABULARY, (rows, 32))


@pytest.mark.parametrize("causal", [True, False])
def test_an_answer_reads_only_what_it_may(causal: bool) -> None:
    """The score does not change with the hidden token itself, nor, for a causal model, with what follows it."""
    trainer, rows = stirred(causal), texts()
    places = np.full(len(rows), 15)
    found = _answers(trainer, rows, places, 1)
    nats = []
    for row in rows:
        shown = row.copy()
        shown[15] = 1 if not causal else 7
        if causal:
            shown[16:] = 9
        with torch.no_grad():
            logits = trainer.model.logits(torch.from_numpy(shown[None]))[0, 14 if causal else 15]
        nats.append(float(-logits.double().log_softmax(dim=0)[row[15]]))
    assert found["nats"] == pytest.approx(np.mean(nats), rel=1e-5)


def test_rescoring_takes_the_likeliest_whole_text() -> None:
    trainer, rows = stirred(True), texts(6)
    with torch.no_grad():
        right = 0
        for row in rows:
            candidates = trainer.model.logits(torch.from_numpy(row[None, :15]))[0, -1].topk(16).indices.tolist()
            scores = {}
            for token in candidates:
                tried = row.copy()
                tried[15] = token
                log = trainer.model.logits(torch.from_numpy(tried[None]))[0].double().log_softmax(dim=-1)
                scores[token] = sum(float(log[place - 1, tried[place]]) for place in range(1, 32))
            right += max(scores, key=scores.__getitem__) == row[15]
    assert _rescored(trainer, rows, np.full(6, 15)) == right / 6


def test_a_tiny_run_has_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bidirectional_vs_causal, "QUESTIONS", 20)
    found = bidirectional_vs_causal.run(TINY)
    assert len(bidirectional_vs_causal.shows(found)) == 3 and bidirectional_vs_causal.plot(found).startswith("<svg")
    json.dumps(found)
    assert found["causal"]["parameters"] == found["bidirectional"]["parameters"]
    assert found["causal"]["tokens"] == found["bidirectional"]["tokens"] == 4 * 8 * 32
    for kind in ("causal", "bidirectional"):
        for key in ("fill_in", "next_token"):
            assert 0 <= found[kind][key]["accuracy"] <= 1
            assert 0 < found[kind][key]["nats"] < 12
    text = bidirectional_vs_causal.table(found)
    assert len({len(line) for line in text.splitlines()[3:]}) == 1


def test_the_study_is_listed() -> None:
    assert STUDIES["bidirectional-vs-causal"].module == "bidirectional_vs_causal"
