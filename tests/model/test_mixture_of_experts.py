"""The mixture of experts: a dense evaluation, the balance of the load, recomputation, and equal steps however the batch is cut."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import family_of, model_config
from bessemer.model.mixture_of_experts import (
    MixtureOfExperts,
    load_metrics,
    mixtures,
    read_load,
    start_step,
    update_biases,
)
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import ResolvedRecipe, dump, parse
from bessemer.train import device as devices
from bessemer.train.optimizer.muon import matrices
from bessemer.train.trainer import Trainer
from tests.model.samples import config, stirred

SIZES: dict[str, Any] = {"experts": 6, "experts_per_token": 3, "expert_width": 24}


def dense(mixture: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """Evaluate every expert on every token, and sum them with weights that are 0 for the experts not chosen."""
    options, logits = mixture.config, x_BTD @ mixture.router.weight.T
    scores = logits.softmax(-1) if options.router == "softmax" else logits.sigmoid()
    bias = mixture.router.bias if options.has_balance_bias else 0.0
    rank = (scores + bias).argsort(dim=-1, descending=True).argsort(dim=-1)
    weights = torch.where(rank < options.experts_per_token, scores, 0.0)
    if options.router_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("btd,egfd->gbtef", x_BTD, mixture.experts.gate_up)
    out = torch.einsum("btef,edf,bte->btd", F.silu(gate) * up, mixture.experts.down, weights * options.router_scale)
    return out if mixture.shared is None else out + mixture.shared(x_BTD)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "sigmoid", "balance": "both", "shared_experts": 2, "router_scale": 2.5},
        {"router_normalised": False},
    ],
)
def test_output_and_gradients_equal_a_dense_evaluation(
    changes: dict[str, Any], dtype: torch.dtype, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matmul per expert, as on a CPU, and the grouped matmul of GPUs, which torch has for fp32 and bf16."""
    monkeypatch.setattr("bessemer.model.mixture_of_experts.is_eager_cpu", lambda x: not is_grouped)
    model = stirred(config(**SIZES, **changes)).to(dtype)
    (_, mixture), *_ = mixtures(model)
    x = torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    trained = [x, *(parameter for parameter in mixture.parameters() if parameter.requires_grad)]
    output = mixture(x)
    found = [output, *torch.autograd.grad(output.square().sum(), trained)]
    assert torch.equal(mixture(x), output), "deterministic"
    exact = mixture.double()
    wide = x.detach().double().requires_grad_()
    chosen = [wide, *(parameter for parameter in exact.parameters() if parameter.requires_grad)]
    wanted = dense(exact, wide)
    gradients = torch.autograd.grad(wanted.square().sum(), chosen)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for one, other in zip(found, (wanted, *gradients), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_the_facts_equal_the_model() -> None:
    wanted = config(layers=3, **SIZES, shared_experts=1, dense_layers=1, balance="bias")
    named = dict(stirred(wanted).named_parameters())
    assert sum(parameter.numel() for parameter in named.values()) == wanted.parameters
    for name, parameter in named.items():
        assert (facts := wanted.parameter_facts(name)) is None or facts.shape == parameter.shape
    routed = 3 * 32 * 24
    assert wanted.expert_parameters == 2 * 6 * routed and wanted.parameters - wanted.active_parameters == 2 * 3 * routed
    assert flops_per_token(wanted) < flops_per_token(wanted.with_changes(experts_per_token=6))
    assert [list(one.shape) for one in matrices("blocks.1.mlp.experts.gate_up", torch.zeros(6, 2, 24, 32))] == [
        [24, 32]
    ] * 12


def test_the_auxiliary_loss_balances_and_has_the_stated_gradient() -> None:
    """The loss is E sum f P of each sequence, and K for equal loads; its gradient arrives without a path through the output."""
    model = stirred(config(layers=1, **SIZES, balance_loss=0.5, router_z_loss=0.25)).double()
    (_, mixture), *_ = mixtures(model)
    start_step(model, torch.tensor(2.0))
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    mixture(x).sum().mul(0.0).backward()
    logits = x @ mixture.router.weight.T
    scores = logits.softmax(-1)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(3, dim=-1).indices, 1.0)
    balance = 9 * 6 * (chosen.mean(1) * scores.mean(1)).sum()
    auxiliary = 0.5 * balance + 0.25 * logits.logsumexp(-1).square().sum()
    assert mixture.step_load is not None
    torch.testing.assert_close(mixture.step_load, torch.cat([chosen.sum((0, 1)), auxiliary.detach()[None]]))
    (wanted,) = torch.autograd.grad(2.0 * auxiliary, [mixture.router.weight])
    torch.testing.assert_close(mixture.router.weight.grad, wanted)


def test_the_metrics_of_the_load_equal_those_of_the_routers_choices() -> None:
    model = stirred(config(layers=2, **SIZES, dense_layers=1)).double()
    (_, mixture), *_ = mixtures(model)
    with torch.no_grad():
        mixture.router.weight.mul_(torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 0.0])[:, None])
    start_step(model, torch.tensor(1.0))
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    for rows in x.split(1):  # micro-batches
        mixture(rows.requires_grad_()).sum().backward()
    choices = (x @ mixture.router.weight.T).topk(3).indices.flatten().tolist()
    loads = [choices.count(expert) / len(choices) for expert in range(6)]
    found = load_metrics(read_load(model, torch.device("cpu")), 1)
    entropy = -sum(share * math.log(share) for share in loads if share) / math.log(6)
    assert found["max_violation"]["1"] == pytest.approx(6 * max(loads) - 1, abs=5e-5)
    assert found["load_entropy"]["1"] == pytest.approx(entropy, abs=5e-5)
    assert found["dead_experts"] == {"1": sum(6 * share < 0.1 for share in loads)}
    assert found["hot_experts"] == {"1": sum(6 * share > 2 for share in loads)}
    assert list(bytes.fromhex(found["expert_load"]["1"])) == [round(16 * 6 * share) for share in loads]
    extreme = load_metrics(torch.tensor([[400.0] + [0.0] * 40, [0.0] * 41], dtype=torch.float64), 0)
    assert extreme["expert_load"]["0"] == "ff" + "00" * 39 and extreme["load_entropy"] == {"0": 0.0, "1": 0.0}
    assert (extreme["dead_experts"], extreme["hot_experts"]) == ({"0": 39, "1": 40}, {"0": 1, "1": 0})


def test_the_bias_moves_towards_the_mean_load() -> None:
    model = stirred(config(layers=1, **SIZES, balance="bias", balance_rate=0.125))
    (_, mixture), *_ = mixtures(model)
    before = mixture.router.bias.clone()
    mixture.step_load = torch.tensor([5.0, 1.0, 3.0, 3.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    update_biases(model, torch.tensor(1.0))
    assert torch.equal(mixture.router.bias, before), "a skipped update changes nothing"
    update_biases(model, torch.tensor(0.0))
    torch.testing.assert_close(mixture.router.bias - before, torch.tensor([-0.125, 0.125, 0.0, 0.0, 0.0, 0.0]))


def losses(**train: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train six steps, and return the losses, the auxiliary parts and the final weights."""
    text = "[run]\nname = 'x'\n"
    values = {
        "tokens.sequence_length": 16, "model.layers": 3, "model.width": 32, "model.heads": 2, "model.experts": 4,
        "model.shared_experts": 1, "model.dense_layers": 1, "model.balance": '"both"', "model.router_z_loss": 0.001,
        "model.balance_rate": 0.01, "train.steps": 6, "train.global_batch_tokens": 128, "train.micro_batch": 2,
        "train.precision": '"fp64"', "train.optimizer.learning_rate": 0.02, **train,
    }  # fmt: skip
    recipe = resolve(parse(text, "x", [f"{key}={value}" for key, value in values.items()]), 64)
    trainer = Trainer(recipe, build_model(model_config(recipe, 64), 0), devices.choose(recipe.train), 0, 1)
    draw, rows = np.random.default_rng(0), []
    for step in range(6):
        batch = trainer.task.synthetic_batch(draw, 8, trainer.model.config)
        stats = trainer.forward_backward(batch)
        trainer.update(step, stats.grad_norm)
        rows.append(trainer.read([stats])[0])
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    return [row.loss for row in rows], [row.objective_loss - row.loss for row in rows], weights


@pytest.mark.parametrize(
    "train",
    [
        {"train.micro_batch": 8},
        {"train.micro_batch": 1},
        {"train.recompute": '"full"'},
        {"train.recompute": '"selective"'},
    ],
)
def test_steps_do_not_depend_on_micro_batches_or_recomputation(train: dict[str, Any]) -> None:
    loss, auxiliary, weights = losses()
    again, auxiliary_again, weights_again = losses(**train)
    assert again == pytest.approx(loss, abs=1e-10) and auxiliary_again == pytest.approx(auxiliary, abs=1e-10)
    assert min(auxiliary) > 0.0 and max(weights["blocks.2.mlp.router.bias"].abs()) >= 0.01 - 1e-9
    for name, weight in weights.items():
        torch.testing.assert_close(weights_again[name], weight, rtol=0, atol=1e-7)


def test_muon_trains_the_experts() -> None:
    loss, _, _ = losses(**{"train.optimizer.kind": '"muon"', "train.precision": '"bf16"'})
    assert all(value < 10 for value in loss)


@pytest.mark.parametrize(
    ("keys", "named"),
    [({"experts": 2, "experts_per_token": 3}, "experts_per_token"), ({"expert_width": 64}, "expert_width"),
     ({"experts": 4, "mlp_width": 64}, "mlp_width"), ({"experts": 4, "dense_layers": 2}, "dense_layers"),
     ({"experts": 4, "expert_width": 32, "mlp_width": 64}, "mlp_width"), ({"experts": 4, "expert_width": 0}, "expert_width"),
     ({"balance": "bias"}, "balance"), ({"experts": 4, "mlp_bias": "true"}, "mlp_bias"),
     ({"experts": 4, "balance": "none", "balance_loss": 0.01}, "balance_loss"), ({"experts": 4, "balance_rate": 0.1}, "balance_rate"),
     ({"family": "dots1", "balance_loss": 0.1}, "balance_loss"), ({"family": "mixtral", "experts_per_token": 9}, "experts_per_token"),
     ({"global_every": 2}, "global_every"), ({"window_rope_theta": 1e4}, "window_rope_theta")],
)  # fmt: skip
def test_keys_that_do_not_fit_the_model_are_errors(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=rf"model\.{named}: "):
        resolved(depth=2, **keys)


def resolved(**model: Any) -> ResolvedRecipe:
    return resolve(parse("[run]\nname = 'x'\n", "x", [f"model.{key}={value}" for key, value in model.items()]), 64)


@pytest.mark.parametrize(
    "keys", [{"family": "mixtral", "experts_per_token": 4}, {"experts": 4, "dense_layers": 1, "mlp_width": 64}]
)
def test_a_resolved_mixture_is_a_recipe_of_itself(keys: dict[str, Any]) -> None:
    recipe = resolved(depth=2, **keys)
    assert keys.items() <= recipe.model.model_dump().items() and recipe.model.mlp_width == keys.get("mlp_width")
    assert resolve(parse(dump(recipe), "x"), 64) == recipe


def test_a_family_that_cannot_express_the_router_is_an_error() -> None:
    assert family_of(config(**SIZES)).name == "qwen3_moe"
    shared = {"router": "sigmoid", "balance": "both", "shared_experts": 1, "router_scale": 2.0, "dense_layers": 1}
    assert family_of(config(**SIZES, **shared)).name == "dots1"
    for key, value in {"balance": "bias", "shared_experts": 1, "router": "sigmoid", "router_scale": 2.0}.items():
        with pytest.raises(InputError, match=rf"qwen3_moe with {key} = "):
            family_of(config(**SIZES, **{key: value}))


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [({"experts": 16, "experts_per_token": 4}, (16, 4, 352)), ({"experts": 1}, (1, 1, 1408)),
     ({"family": "qwen3_moe"}, (128, 8, 192)), ({"experts": 16, "shared_experts": 2}, (16, 2, 352))],
)  # fmt: skip
def test_a_mixture_by_depth_is_trained_like_the_dense_model(keys: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    """It has as many active parameters, so that tokens, batch and learning rate are those of the dense model."""
    sparse, plain = resolved(depth=8, **keys), resolved(depth=8)
    config = model_config(sparse, 64)
    assert (config.experts, config.experts_per_token, config.expert_width) == sizes
    assert config.active_parameters == pytest.approx(model_config(plain, 64).active_parameters, rel=0.1)
    assert sparse.train.steps == pytest.approx(plain.train.steps, rel=0.1)
    assert sparse.train.global_batch_tokens == plain.train.global_batch_tokens
