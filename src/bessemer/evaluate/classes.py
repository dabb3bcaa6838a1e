"""How well a classifier knows each class, from its confusion matrix."""

from __future__ import annotations

from typing import Any


def by_class(labels: tuple[str, ...], confusion: list[list[int]]) -> list[dict[str, Any]]:
    """Texts, precision, recall and F1 of each label; None where there is nothing to divide by.

    confusion: (labels, labels) texts of each class (row) by what they were taken for (column). Precision: of what was
    taken for the class, the share that is of it; recall: of what is of the class, the share that was taken for it; F1:
    their harmonic mean, 2 tp / (2 tp + fp + fn), 0 where all is wrong.
    """
    rows = []
    for number, label in enumerate(labels):
        right = confusion[number][number]
        texts, taken = sum(confusion[number]), sum(row[number] for row in confusion)
        rows.append(
            {
                "label": label,
                "texts": texts,
                "precision": right / taken if taken else None,
                "recall": right / texts if texts else None,
                "f1": 2 * right / (texts + taken) if texts + taken else None,
            }
        )
    return rows
