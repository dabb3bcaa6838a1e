"""The formula of what a tensor group exchanges, against what its processes do exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on
from test_tensor import CASES, config_of, data_of, step, task_of
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.layout.communication import tensor_bytes, tensor_rank_parameters
from bessemer.layout.pipeline_stages import PartParameters, pipeline_ranks
from bessemer.model.transformer import meta_model
from bessemer.parallel.mesh import join
from bessemer.parallel.tensor import apply_tp, reduce_partial_gradients, sharded_dimension
from bessemer.recipe import Parallel
from bessemer.train import recompute
from tests.model.samples import stirred

NAMES = [
    "llama", "llama, all terms", "qwen3, tied, all recomputed", "olmo2", "olmo2, a part recomputed", "gpt2", "bert",
    "modernbert, classifier",
]  # fmt: skip


class Counter(TorchDispatchMode):
    """Adds up the whole tensors that collectives work on, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operator(*arguments, **(options or {}))
        if operator.namespace in ("_c10d_functional", "c10d") and "wait" not in operator.name():
            kind = next(kind for kind in self.found if kind in operator.name())
            whole = result if kind == "all_gather" else arguments[0]
            self.found[kind] += whole.numel() * whole.element_size()
        return result


def exchanged(layout: Parallel) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    mesh, found = join(layout, torch.device("cpu")), {}
    for name in NAMES:
        case = CASES[name]
        wanted = config_of(case)
        model = stirred(wanted)
        apply_tp(model, mesh)
        blocks = wanted.layers if "recompute" in case else 0
        recompute.apply_recompute(model, case.get("recompute", "none"), blocks)
        inputs, targets = data_of(wanted)
        with Counter() as counter:
            step(model, task_of(case, wanted), inputs, targets)
            reduce_partial_gradients(model)
        planned, replicated = tensor_bytes(
            wanted, layout.tensor, inputs.numel(), int((targets >= 0).sum()), recomputed_total=blocks,
            label_smoothing="label_smoothing=0.1" in case.get("terms", ()),
        )  # fmt: skip
        planned["all_reduce"] += 4 * replicated
        found[name] = (counter.found, planned)
    return found


def test_the_formula_is_what_is_exchanged() -> None:
    for of in run_on(2, exchanged, Parallel(tensor=2), timeout=300):
        for name, (counted, planned) in of.items():
            assert counted == planned, name


@pytest.mark.parametrize(
    "case",
    [*(CASES[name] for name in ("llama", "bert", "gpt2")), {"family": "llama", "qkv_bias": True, "mlp_bias": True}],
)
def test_the_parameters_of_a_tensor_rank_are_those_of_its_shards(case: dict[str, Any]) -> None:
    """By formula, for the bytes sent and for memory; biases of joint matrices are divided with them."""
    made, layout = config_of({**case, "vocabulary": 64}), Parallel(tensor=2)
    held = sum(
        parameter.numel() // (1 if sharded_dimension(name) is None else 2)
        for name, parameter in meta_model(made).named_parameters()
    )
    (part,) = pipeline_ranks(made, layout)
    assert PartParameters.of(made, part, 2).all == held
    assert sum(tensor_rank_parameters(made, layout)) == held
