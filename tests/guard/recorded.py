"""Losses and gradient norms of healthy runs, in a small file.

    python -m tests.guard.recorded RUNS...    write recorded.npz from run directories that were trained with the recipe below

The runs in the file differ only in run.seed (initial weights and order of the data): 10,000 steps each on source files of
Python's standard library.
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.run.files import read_json_lines

FILE = Path(__file__).with_name("recorded.npz")
UNIT = 4096.0  # losses in nats and natural logarithms of norms, rounded to 1/4096

RECIPE = """
[[corpus.sources]]
name = "code"
format = "code"
paths = ["python://stdlib/*.py", "python://stdlib/asyncio", "python://stdlib/email", "python://stdlib/unittest"]
[tokenizer]
vocabulary = 384
[tokens]
sequence_length = 32
held_out = 0.02
[model]
layers = 1
width = 48
heads = 1
[train]
steps = 10_000
global_batch_tokens = 512
micro_batch = 16
device = "cpu"
[train.optimizer]
learning_rate = 0.003
"""


def curves() -> npt.NDArray[np.float64]:
    """Return loss and gradient norm as (runs, steps, 2)."""
    values = np.load(FILE)["values"].astype(np.float64) / UNIT
    values[:, :, 1] = np.exp(values[:, :, 1])
    return values


def pack(folders: list[Path]) -> None:
    """Write the file."""
    runs = []
    for folder in folders:
        rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
        runs.append([(row["loss"], np.log(row["grad_norm"])) for row in rows])
    np.savez_compressed(FILE, values=np.round(np.array(runs) * UNIT).astype(np.int16))


if __name__ == "__main__":
    pack([Path(name) for name in sys.argv[1:]])
