"""Real weights, where a folder in the Hugging Face layout is given in BESSEMER_REAL_WEIGHTS."""

import os
from pathlib import Path

import pytest

from bessemer.run import RunFolder
from bessemer.train.imported import import_model

pytest.importorskip("transformers")
FOLDER = os.environ.get("BESSEMER_REAL_WEIGHTS")


@pytest.mark.skipif(FOLDER is None, reason="BESSEMER_REAL_WEIGHTS names no folder of real weights")
def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    check = import_model(Path(str(FOLDER)), RunFolder(tmp_path / "run"), "run", str(tmp_path))
    assert check.logits_max_difference < 1e-4
    assert check.greedy_tokens_equal == 32
