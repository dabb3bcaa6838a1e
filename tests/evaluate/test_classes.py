import pytest

from bessemer.evaluate.final import scores_by_class


def test_precision_recall_and_f1_by_hand() -> None:
    # 10 of a: 8 found; 5 of b: 3 found; none of c, but one taken for it.
    rows = scores_by_class(("a", "b", "c"), [[8, 1, 1], [2, 3, 0], [0, 0, 0]])
    assert [row["texts"] for row in rows] == [10, 5, 0]
    assert [row["precision"] for row in rows] == [8 / 10, 3 / 4, 0.0]
    assert [row["recall"] for row in rows] == [0.8, 0.6, None]
    for row, f1 in zip(rows[:2], (2 * 0.8 * 0.8 / 1.6, 2 * 0.75 * 0.6 / 1.35), strict=True):
        assert row["f1"] == pytest.approx(f1)
    assert rows[2]["f1"] == 0.0
    nothing = scores_by_class(("a", "b"), [[1, 0], [0, 0]])[1]
    assert nothing == {"label": "b", "texts": 0, "precision": None, "recall": None, "f1": None}
