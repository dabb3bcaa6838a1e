"""The quality classifier as a step over the whole corpus, with a receipt.

quality/{identities,scores,stays,band}.npy   one row a document, sorted by identity
quality/report/                              quality.json and the trained model, published with the corpus
quality/stage.json                           the receipt
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.passed import Passed
from bessemer.corpus.work import made, receipt
from bessemer.recipe import Corpus
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    from bessemer.corpus.quality.classify import Judgement

ARRAYS = ("identities", "scores", "stays", "band")
REPORT = "report"


def score_all(corpus: Corpus, passed: Passed, inputs: str) -> dict[str, Any]:
    """Train or load the classifier and score every document, unless that is done; gives the receipt."""
    import numpy as np

    from bessemer.corpus.quality.classify import classify

    folder = passed.work / "quality"
    done = receipt(folder, inputs) if folder.exists() else None
    if done is None:
        facts: dict[str, Any] = {}
        with made(folder, inputs, facts) as staged:
            (staged / REPORT).mkdir()
            names = [source.name for source in corpus.sources]
            judgement = classify(corpus.quality, names, passed, staged / REPORT)
            for name in ARRAYS:
                np.save(staged / f"{name}.npy", getattr(judgement, name))
            facts |= {
                "limit": judgement.limit,
                "documents": len(judgement.scores),
                "rejected": int((~judgement.stays).sum()),
            }
        done = receipt(folder, inputs)
    assert done is not None
    return done


def load(work: Path) -> Judgement | None:
    """What the classifier found, mapped into memory; None when it was not asked."""
    import numpy as np

    from bessemer.corpus.quality.classify import Judgement

    folder = work / "quality"
    if not (folder / STAGE_FILE).exists():
        return None
    identities, scores, stays, band = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
    return Judgement(identities, scores, stays, band, read_json(folder / STAGE_FILE)["limit"])
