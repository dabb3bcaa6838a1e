"""Memory of deduplicating 300,000 documents, measured in a separate process."""

import subprocess
import sys

import pytest

NUM_DOCUMENTS = 300_000
CODE = """
import sys, tempfile
from dataclasses import dataclass
from pathlib import Path
import numpy as np, pyarrow as pa
from bessemer.corpus.dedup.search import DuplicateStep
from bessemer.corpus.global_steps import CorpusDocuments, run_step

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

step, total = DuplicateStep(bands=8, rows=4, min_jaccard=0.7, verify=False, memory_mib=32), int(sys.argv[1])

@dataclass(frozen=True)
class Part:
    start: int
    size: int = 20_000
    corpus: str = ""
    has_signatures: bool = True

    def __call__(self, columns):
        rng, size = np.random.default_rng(self.start), self.size
        signed = rng.integers(0, 1 << 32, (size, 32), dtype=np.uint32)
        signed[size // 2 :][: size // 40] = signed[: size // 40]
        names = rng.bytes(16 * size).hex()
        yield pa.table({
            "identity": [names[32 * i : 32 * i + 32] for i in range(size)],
            "exact": pa.array([rng.bytes(16) for _ in range(size)], pa.binary()),
            "characters": np.full(size, 1000),
            "signature": pa.FixedSizeListArray.from_arrays(pa.array(signed.reshape(-1)), 32),
        })

with tempfile.TemporaryDirectory() as folder:
    run_step(step, CorpusDocuments([Part(0)], Path(folder) / "a", ""))
    before = peak()
    found = run_step(step, CorpusDocuments([Part(start) for start in range(0, total, 20_000)], Path(folder) / "b", ""))
print(before, peak(), found["statistics"]["removed"]["near"])
"""


@pytest.mark.long
@pytest.mark.usefixtures("cold")
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_many_documents_take_no_more_than_memory_mib() -> None:
    """Memory is `memory_mib` for a key range plus 16 MiB for the allocator, for any number of documents."""
    done = subprocess.run([sys.executable, "-c", CODE, str(NUM_DOCUMENTS)], capture_output=True, text=True, check=True)
    before, peak, removed = done.stdout.split()
    assert int(removed) == NUM_DOCUMENTS // 40
    assert float(peak) - float(before) < 32 + 16
