"""The plan of what blocks that are not compiled keep in bf16 on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.distributed.memory import peak_memory
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import ElementBytes
from bessemer.recipe import Parallel, Train

ROWS, LENGTH = 2, 128


def config(**changes: Any) -> ModelConfig:
    dimensions = {
        "vocabulary": 512,
        "width": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "mlp_width": 704,
        "layers": 2,
    }
    return ModelConfig(**(dimensions | {"sequence_length": LENGTH} | changes))


def test_a_plan_of_a_gpu_counts_them_where_blocks_are_not_compiled() -> None:
    model, gpu = config(layers=20), ElementBytes(2, cast=2)
    held = {
        compile_: peak_memory(
            Train(micro_batch=ROWS, global_batch_tokens=ROWS * LENGTH, compile=compile_), Parallel(), model, gpu, is_cuda=True
        ).activations
        for compile_ in ("off", "auto")
    }  # fmt: skip
    tokens = ROWS * LENGTH
    per_block = (held["off"] - held["auto"]) / 20
    compiled = 2 * (4 * 256 + 512 + 2 * 256 + 512 + 3 * 704)  # norms, attention with its joined matmul, MLP, by hand
    assert per_block == pytest.approx(tokens * (sum(part.eager_bytes for part in model.sublayers) - compiled))
