"""Steps and state of the optimizer: saved, restored, rejected."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.checkpoint import save
from bessemer.common.errors import BessemerError
from bessemer.train import optimizer as optimizers
from bessemer.train.optimizer import WeightAverage
from bessemer.train.optimizer import moments as low
from tests.train.optimizer.conftest import Driven
from tests.train.optimizer.own_rules import own


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", own("SignMomentum")])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_saved_state_continues_bit_for_bit(driven, kind: str, state: str, tmp_path) -> None:
    straight = driven(kind=kind, state=state)
    straight.take(6)
    first, second = driven(kind=kind, state=state), driven(kind=kind, state=state)
    first.take(3)
    tensors = optimizers.state_tensors(first.model, first.optimizer)
    saved_there = save(tmp_path, 3, {"optimizer": tensors}, {}, keep=1)
    with torch.no_grad():
        for (_, there), (_, here) in zip(second.model.named_parameters(), first.model.named_parameters(), strict=True):
            there.copy_(here)
    optimizers.load_state(second.model, second.optimizer, saved_there)
    second.taken = 3
    second.take(3)
    for name, weight in straight.weights().items():
        assert np.array_equal(second.weights()[name], weight), name
    saved = optimizers.state_tensors(second.model, second.optimizer)
    for name, tensor in optimizers.state_tensors(straight.model, straight.optimizer).items():
        assert torch.equal(saved[name], tensor), name


def test_fp32_adamw_equals_torchs_bit_for_bit(driven) -> None:
    made, wanted = driven(eps=1e-6), driven(eps=1e-6)
    theirs = torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in wanted.optimizer.param_groups],
        lr=0.01, betas=(0.9, 0.95), eps=1e-6, fused=True,
    )  # fmt: skip
    for group in theirs.param_groups:
        group["rate"] = 1.0
    wanted.optimizer = theirs
    left, right = made.take(4), wanted.take(4)
    assert all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"state": "8bit"}, {}), ({}, {"state": "8bit"}), ({"kind": "lion"}, {}), ({}, {"kind": "muon"})],
)
def test_a_state_of_another_kind_is_an_error(driven, saved, loaded, tmp_path: Path) -> None:
    first, second = driven(**saved), driven(**loaded)
    first.take(1)
    there = save(tmp_path, 1, {"optimizer": optimizers.state_tensors(first.model, first.optimizer)}, {}, keep=1)
    with pytest.raises(BessemerError, match="train.optimizer"):
        optimizers.load_state(second.model, second.optimizer, there)


def bits(driven: Driven, average: WeightAverage) -> dict[str, Any]:
    found = {name: weight.detach().clone() for name, weight in driven.model.named_parameters()}
    for name, weight in driven.model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in driven.optimizer.state[weight].items()}
    return found | {f"{name}/ema": value.clone() for name, value in average.tensors.items()}


def step(driven: Driven, average: WeightAverage, number: int, skip: float, factor: float = 1.0) -> dict[str, Any]:
    for name, weight in driven.model.named_parameters():
        weight.grad = torch.from_numpy(driven.gradient(name, number)) * factor
    scalar = torch.tensor(skip)
    driven.optimizer.step(scalar)
    average.update(number, scalar)
    return bits(driven, average)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", own("SignMomentum")])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_skipped_update_changes_no_bit(driven: Callable[..., Driven], kind: str, state: str) -> None:
    one, other = driven(kind=kind, state=state), driven(kind=kind, state=state)
    averages = [WeightAverage(each.model, 0.9) for each in (one, other)]
    for number in range(2):
        plain, before = step(one, averages[0], number, 0.0), step(other, averages[1], number, 0.0)
        assert plain.keys() == before.keys() and all(torch.equal(plain[name], before[name]) for name in plain)
    for factor in (math.nan, math.inf, 1e30):
        after = step(other, averages[1], 7, 1.0, factor)
        assert all(torch.equal(raw(before[name]), raw(after[name])) for name in before)
    plain, after = step(one, averages[0], 2, 0.0), step(other, averages[1], 2, 0.0)
    assert all(torch.equal(plain[name], after[name]) for name in plain)


STEPS = 5


def code_of_patterns(signed: bool) -> np.ndarray:
    """Return the dynamic code from its bit patterns: [sign] zeros, a one, a fraction; two patterns are 0 and 1."""
    values = [0.0, 1.0]
    bits = 7 if signed else 8
    for pattern in range(2**bits):
        text = format(pattern, f"0{bits}b")
        zeros = len(text) - len(text.lstrip("0"))
        if zeros > 6:
            continue
        fraction = text[zeros + 1 :]
        low_end, width = 0.1, 0.9
        for bit in fraction:  # each bit halves the remainder of [0.1, 1]
            width /= 2
            low_end += width if bit == "1" else 0.0
        value = (low_end + width / 2) / 10**zeros
        values += [value, -value] if signed else [value]
    return np.sort(values)


def through_8_bits(values: np.ndarray, signed: bool) -> np.ndarray:
    """Round every block of 256, in units of its largest magnitude, to the nearest value of the code."""
    code = code_of_patterns(signed)
    flat, out = values.ravel(), np.empty(values.size)
    for start in range(0, values.size, 256):
        block = flat[start : start + 256]
        largest = np.abs(block).max()
        if largest == 0:
            out[start : start + 256] = 0
            continue
        nearest = np.abs((block / largest)[:, None] - code[None]).argmin(axis=1)
        if not signed:
            nearest = np.where((block > 0) & (nearest == 0), 1, nearest)
        out[start : start + 256] = code[nearest] * largest
    return out.reshape(values.shape)


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_is_stored_as_its_nearest_values(signed: bool) -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=4096) * 10.0 ** draw.uniform(-8, 0, 4096)
    values = values if signed else np.abs(values)
    values[:300] = 0
    moment, part = torch.from_numpy(values.astype(np.float32)), slice(256, 4096)
    state = low.zero_moment(moment, "m", "8bit")
    low.write(state, "m", signed, part, moment[part], torch.tensor(0.0))
    assert state["m"].dtype == torch.uint8 and state["m_scale"].dtype == torch.float32
    assert len(state["m_scale"]) == 16 and not state["m"][:256].any()
    back = low.quantize(state, "m", signed, part).dequantize().double().numpy()
    expected = through_8_bits(moment[part].double().numpy(), signed)
    differs = np.abs(back - expected) > 1e-6 * np.abs(expected)
    assert differs.mean() <= 0.002  # values halfway between two in fp32
    assert (back[:44] == 0).all() and (signed or (back[44:] > 0).all())


def reference_parameter(made, name: str, weight: np.ndarray, keep, rule: str) -> np.ndarray:
    """Return a parameter after STEPS steps in float64, with moments passed through `keep` between the steps."""
    m = v = np.zeros_like(weight)
    decay = 0.3 if name.endswith((".qkv", "out.weight", "gate_up", "down.weight")) else 0.0
    for step in range(STEPS):
        g, rate = made.gradient(name, step).astype(np.float64), 0.01 / (step + 1)
        if rule == "lion":
            weight = weight - rate * (np.sign(0.9 * m + 0.1 * g) + decay * weight)
            m = keep(0.95 * m + 0.05 * g, True)
            continue
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        corrected = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8)
        weight = weight * (1 - rate * decay) - rate * corrected
        m, v = keep(m, True), keep(v, False)
    return weight


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_8_bit_steps_equal_the_formula(driven, rule: str) -> None:
    made = driven(kind=rule, state="8bit")
    before = made.weights()
    found = made.take(STEPS)
    for name, weight in before.items():
        coded = weight.size >= 4096
        wanted = reference_parameter(made, name, weight, through_8_bits if coded else lambda x, signed: x, rule)
        # A value on a boundary may be rounded either way, which moves a few weights by a part of a step.
        odd = np.abs(found[name] - wanted) > 2e-6
        assert odd.mean() <= (0.005 if coded else 0.0), name
        plain = reference_parameter(made, name, weight, lambda x, signed: x, rule)
        if coded and rule == "adamw":
            assert np.abs(plain - wanted).max() > 1e-4, "the moments do pass through 8 bits"


def test_slices_of_a_tensor_give_the_same_update(driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor too large to be fp32 at once is processed in parts."""
    whole = driven(state="8bit").take(3)
    monkeypatch.setattr(low, "SLICE", 1024)
    cut = driven(state="8bit").take(3)
    assert all(np.array_equal(cut[name], whole[name]) for name in whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["adamw", "lion", "muon"])
def test_steps_on_a_gpu_equal_those_on_a_cpu(driven, rule: str) -> None:
    here, there = driven(kind=rule, state="8bit"), driven(kind=rule, state="8bit")
    there.model.cuda()
    there.optimizer = optimizers.build(there.model, there.settings)
    for step in range(3):
        for made in (here, there):
            for name, weight in made.model.named_parameters():
                weight.grad = torch.from_numpy(made.gradient(name, step)).to(weight.device)
            made.optimizer.step()
    for (name, one), other in zip(here.model.named_parameters(), there.model.parameters(), strict=True):
        off = (one - other.cpu()).abs() > (2e-2 if rule == "muon" else 1e-5)  # Muon orthogonalises in bf16 there
        assert off.double().mean() <= 0.005, name
        codes = [made.optimizer.state[weight] for made, weight in ((here, one), (there, other))]
        assert all(codes[0][key].dtype == value.dtype for key, value in codes[1].items())
