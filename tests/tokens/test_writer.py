from __future__ import annotations

from pathlib import Path

import numpy as np

from bessemer.tokens.shards import ShardWriter
from bessemer.tokens.stream import Shard

DTYPE = np.dtype("<u2")


def test_tokens_go_to_disk_as_they_come(tmp_path: Path) -> None:
    made = ShardWriter(tmp_path, "s-train", DTYPE, 1 << 30)
    for number in range(8):
        made.add(f"{number:032x}", np.full(1 << 20, 7), 1)
    assert (tmp_path / "s-train-00000.bin").stat().st_size >= 7 * (1 << 21)
    made.close()
    assert Shard(tmp_path / "s-train-00000.bin", DTYPE).offsets.tolist() == [n << 20 for n in range(9)]
