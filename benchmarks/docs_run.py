"""Train the run that the pictures of the documentation show.

It is a small model on the Python code of this machine. One batch is noise, and so are half of the tokens in a series of later
batches: the guard skips the update of the first and rolls back the others.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from bessemer.cli import run_command
from bessemer.tokens.loader import Batch, Loader

STEPS, SEQUENCES, VOCABULARY = 700, 8, 1024
NOISE = {260: 1.0, **dict.fromkeys(range(430, 455), 0.5)}
"""Share of noise tokens by step, counted from 1."""
VALUES = (
    "corpus.sources.code.max_bytes=3_000_000",
    "corpus.sources.docs.max_bytes=1_000_000",
    f"tokenizer.vocabulary={VOCABULARY}",
    f"train.steps={STEPS}",
    f"train.global_batch_tokens={SEQUENCES * 256}",
    f"train.micro_batch={SEQUENCES}",
    "train.watch_every=10",
    "train.validate_every=35",
    "checkpoint.every=50",
    "evaluate.samples=2",
    "report.tensorboard=false",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run")
    folder = parser.parse_args().folder.resolve()
    honest = Loader.batch

    def batch(self: Loader, first: int, count: int) -> Batch:
        """Return the batch with its noise, which depends on the samples: after a rollback the same steps read other samples."""
        read = honest(self, first, count)
        draw = np.random.default_rng(first)
        tokens = np.concatenate([read.inputs, read.targets[:, -1:]], axis=1)
        is_noise = draw.random(tokens.shape) < NOISE.get(first // SEQUENCES + 1, 0.0)
        tokens = np.where(is_noise, draw.integers(0, VOCABULARY, tokens.shape), tokens)
        return replace(read, inputs=tokens[:, :-1], targets=tokens[:, 1:])

    Loader.batch = batch  # type: ignore[method-assign]
    values = (*VALUES, f'run.dir="{folder.parent}"', f'run.name="{folder.name}"')
    return run_command(["run", "demo", *(part for value in values for part in ("--set", value))])


if __name__ == "__main__":
    sys.exit(main())
