"""What blocks that are not compiled keep in bf16 on a GPU, counted as autograd saves it by the same formulas on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bessemer.distributed.memory import eager_bytes_per_block, peak_memory
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import FP32, ElementBytes
from bessemer.model.transformer import build_model
from bessemer.recipe import Parallel, Train
from tests.train.fake_step import formulas_of_gpu

ROWS, LENGTH = 2, 128
BERT: dict[str, Any] = {
    "norm": "layer", "norm_position": "residual", "positions": "learned", "qk_norm": "none", "gated": False, "activation": "gelu",
}  # fmt: skip


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


def saved_bytes(model: ModelConfig) -> int:
    """Of a forward pass with autocast, each storage once, without the weights."""
    built, kept = build_model(model, 0), dict[int, torch.UntypedStorage]()
    ours = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saving, formulas_of_gpu(), torch.autocast("cpu", torch.bfloat16):
        built(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 4}, {"qk_norm": "none"}, {"qk_norm": "full"}, {"rotary_fraction": 0.5}, {"activation": "gelu_tanh"},
     {"gated": False, "activation": "gelu_quick"}, {"gated": False, "activation": "relu2"}, {"norm_position": "both"},
     {"norm_position": "output", "qk_norm": "full"}, BERT, BERT | {"kv_heads": 4}, BERT | {"norm_position": "input"}],
    ids=str,
)  # fmt: skip
def test_a_block_keeps_what_autograd_saves(changes: dict[str, Any]) -> None:
    """To the byte: besides it the casts of the weights, and the angles in bf16, which all rows share."""
    model = config(**changes)
    block = saved_bytes(model.with_changes(layers=3)) - saved_bytes(model)
    casts = 2 * model.block_matrix_parameters
    rotated = int(model.head_dim * model.rotary_fraction) if model.positions == "rotary" else 0
    angles = 2 * 2 * 2 * rotated // 2 * LENGTH  # cosines and sines, of queries and of keys
    # On a CPU an RMS norm keeps a second fp32 copy: of the stream, and of queries and keys.
    more = FP32 * model.norms_each * model.width * (model.norm == "rms")
    more += FP32 * (model.heads + model.kv_heads) * model.head_dim * (model.qk_norm != "none")
    assert block == ROWS * LENGTH * (eager_bytes_per_block(model) + more) + casts + angles


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
    assert per_block == pytest.approx(tokens * (eager_bytes_per_block(model) - compiled))
