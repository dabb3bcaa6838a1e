import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from bessemer.evaluate.final import scores_by_class
from bessemer.evaluate.ngram import NgramModel
from bessemer.evaluate.ppmd import ppmd_bits


def reference_nats(training: list[bytes], order: int, document: bytes) -> float:
    """Return the nats of a document by Witten-Bell interpolation in plain Python, over dictionaries."""
    padded = [[256] * (order - 1) + list(text) for text in training]
    grams = {
        n: Counter(tuple(t[i - n + 1 : i + 1]) for t in padded for i in range(order - 1, len(t)))
        for n in range(1, order + 1)
    }
    successors: dict[tuple[int, ...], set[int]] = {}
    totals: Counter[tuple[int, ...]] = Counter()
    for n in range(1, order + 1):
        for gram, count in grams[n].items():
            successors.setdefault(gram[:-1], set()).add(gram[-1])
            totals[gram[:-1]] += count
    text = [256] * (order - 1) + list(document)
    nats = 0.0
    for i in range(order - 1, len(text)):
        p = 1 / 256
        for n in range(1, order + 1):
            gram = tuple(text[i - n + 1 : i + 1])
            if totals[gram[:-1]]:
                distinct = len(successors[gram[:-1]])
                p = (grams[n][gram] + distinct * p) / (totals[gram[:-1]] + distinct)
        nats -= math.log(p)
    return nats


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_nats_equal_the_reference_formula(order: int) -> None:
    training = [b"the cat sat on the mat", b"the dog sat", b"", bytes(range(200, 256))]
    model = NgramModel(training, order)
    for document in (b"the cat", b"zzz the", bytes([0, 255, 254, 7]), b"t"):
        assert model.nats([document]) == pytest.approx(reference_nats(training, order, document), rel=1e-12)
    assert model.nats([b"the cat", b"a"]) == pytest.approx(model.nats([b"the cat"]) + model.nats([b"a"]), rel=1e-12)


def test_ppmd_bits_equal_those_of_one_compressed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pyppmd = pytest.importorskip("pyppmd", reason="the extra ppmd is not installed")
    text = Path(__file__).read_bytes() * 3
    training, held_out = [text[:3000], text[3000:9000]], [text[9000:9500], b"a few other words", b""]
    both, alone = (
        len(pyppmd.compress(b"".join(parts), max_order=10, mem_size=1 << 30))
        for parts in (training + held_out, training)
    )
    found = ppmd_bits(training, held_out)
    assert found == pytest.approx(8 * (both - alone), abs=64) and found == ppmd_bits(training, held_out)
    assert found < ppmd_bits([], held_out)
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    assert ppmd_bits(training, held_out) is None


def test_precision_recall_and_f1_equal_manual_values() -> None:
    # 10 of a, 8 found; 5 of b, 3 found; none of c, but one predicted.
    rows = scores_by_class(("a", "b", "c"), [[8, 1, 1], [2, 3, 0], [0, 0, 0]])
    assert [row["texts"] for row in rows] == [10, 5, 0]
    assert [row["precision"] for row in rows] == [8 / 10, 3 / 4, 0.0]
    assert [row["recall"] for row in rows] == [0.8, 0.6, None]
    for row, f1 in zip(rows[:2], (2 * 0.8 * 0.8 / 1.6, 2 * 0.75 * 0.6 / 1.35), strict=True):
        assert row["f1"] == pytest.approx(f1)
    assert rows[2]["f1"] == 0.0
    nothing = scores_by_class(("a", "b"), [[1, 0], [0, 0]])[1]
    assert nothing == {"label": "b", "texts": 0, "precision": None, "recall": None, "f1": None}
