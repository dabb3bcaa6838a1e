"""Memory of a million documents, measured in a process of its own."""

import subprocess
import sys

import pytest

NUM_DOCUMENTS = 1_000_000
CODE = """
import sys, tempfile
from pathlib import Path
import numpy as np, pyarrow as pa
from bessemer.corpus.dedup.verdicts import KEPT
from bessemer.corpus.dedup.judging import judge
from bessemer.recipe import Dedup

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

settings, size, total = Dedup(bands=8, rows=4, min_jaccard=0.7, verify=False, memory_mib=64), 20_000, int(sys.argv[1])

def read(columns):
    for start in range(0, total, size):
        rng = np.random.default_rng(start)
        signed = rng.integers(0, 1 << 32, (size, 32), dtype=np.uint32)
        signed[size // 2 : size // 2 + 500] = signed[:500]
        names = rng.bytes(16 * size).hex()
        yield pa.table({
            "identity": [names[32 * i : 32 * i + 32] for i in range(size)],
            "exact": pa.array([rng.bytes(16) for _ in range(size)], pa.binary()),
            "characters": np.full(size, 1000),
            "signature": pa.FixedSizeListArray.from_arrays(pa.array(signed.reshape(-1)), 32),
        })

def one(columns):
    yield next(read(columns)).slice(0, 100)

with tempfile.TemporaryDirectory() as folder:
    judge(one, settings, Path(folder) / "a")
    before = peak()
    found = judge(read, settings, Path(folder) / "b")
print(before, peak(), int((found.verdict != KEPT).sum()))
"""


@pytest.mark.long
@pytest.mark.usefixtures("cold")
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_million_documents_take_what_the_arithmetic_says() -> None:
    """80 bytes a document and memory_mib on top (docs/dedup.md), a tenth for the allocator, and 30 MiB a table."""
    done = subprocess.run([sys.executable, "-c", CODE, str(NUM_DOCUMENTS)], capture_output=True, text=True, check=True)
    before, peak, removed = done.stdout.split()
    assert int(removed) == NUM_DOCUMENTS // 20_000 * 500
    assert float(peak) - float(before) < 1.1 * (NUM_DOCUMENTS * 80 / (1 << 20) + 64) + 30
