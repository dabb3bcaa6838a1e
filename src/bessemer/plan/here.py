"""The keys that every plan has, for a plan of this machine: those of plan/outcome.to_dict, from plan.cost's.

So that who reads plan.json or `bessemer plan --json` need not ask which of the two it was. What processes tell each other is
not in a plan of this machine, and its bubble is that of the schedule with stages alike.
"""

from __future__ import annotations

from typing import Any

from bessemer.layout.flops import recomputed_flops_per_token
from bessemer.layout.schedules import generate
from bessemer.model.config import ModelConfig
from bessemer.plan import cost, pictures
from bessemer.plan.laws.chinchilla import optimal_tokens, training_flops
from bessemer.plan.laws.standing import standing
from bessemer.plan.timetable import simulate
from bessemer.recipe import Batches, Recipe

SURFACE_POINTS = 21  # on a side: finer than the lines that are drawn of it, and small in a file
MOST_MICRO_BATCHES = 256  # of a simulated schedule; more change nothing that is seen


def keys(recipe: Recipe, config: ModelConfig, plan: cost.Plan, *, devices: int, recomputed: int) -> dict[str, Any]:
    """What a plan of a resolved recipe comes to by the common names. devices: that share its work; recomputed: blocks."""
    again = recomputed_flops_per_token(recipe, config, recomputed)
    hours = plan.seconds / 3600 * devices
    price = recipe.cluster.price
    model_rate = plan.flops_per_token * plan.tokens_per_second / devices
    return {
        "six_nd_flops": training_flops(plan.parameters, plan.tokens),
        "tokens_per_second_per_device": plan.tokens_per_second / devices,
        "model_tflops_per_device": model_rate / 1e12,
        "hfu": plan.mfu * (1.0 + again / plan.flops_per_token),
        "bubble": bubble(recipe),
        "days": plan.seconds / 86_400,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
        "layout": layout(recipe),
        "memory_bytes_per_device": memory(plan.memory_bytes),
        **scaling(recipe, plan.parameters, plan.tokens),
    }


def micro_batches(recipe: Recipe) -> int:
    """Forward passes of a full step on each process."""
    each = (recipe.train.micro_batch or 1) * recipe.parallel.data
    return max(Batches.of(recipe).full // each, 1)


def bubble(recipe: Recipe) -> float:
    """Share of the passes' time in which the ranks of the pipeline wait, all stages alike."""
    layout = recipe.parallel
    if layout.pipeline == 1:
        return 0.0
    count = min(micro_batches(recipe), MOST_MICRO_BATCHES)
    return 1.0 - simulate(generate(layout.schedule, layout.pipeline, count, layout.stages_each)).utilisation


def layout(recipe: Recipe) -> dict[str, Any]:
    """The ways that divide the work, and what goes with them."""
    of, train = recipe.parallel, recipe.train
    return {
        "replicate": of.replicate,
        "shard": of.shard,
        "tensor": of.tensor,
        "pipeline": of.pipeline,
        "virtual": of.stages_each,
        "context": of.context,
        "micro_batch": train.micro_batch,
        "recompute": train.recompute,
        "zero": of.zero if of.shard * of.context > 1 else 0,
        "schedule": of.schedule,
        "micro_batches": micro_batches(recipe),
    }


def memory(parts: dict[str, int]) -> dict[str, int]:
    """Parts by the common names: narrow copies of the weights are buffers, and what is only here keeps its name."""
    named = {name: parts[name] for name in ("weights", "gradients", "optimizer", "activations", "logits")}
    rest = {name: parts[name] for name in ("average", "slack", "base")}
    return {**named, "buffers": parts["casts"], **rest, "total": parts["total"]}


def scaling(recipe: Recipe, parameters: int, tokens: int) -> dict[str, Any]:
    """Where the plan stands by the scaling laws, which are of models that predict text: nothing of a classifier."""
    if recipe.train.objective == "classify":
        return {"chinchilla": None}
    found = standing(parameters, tokens)
    return {
        "chinchilla": {
            "optimal_tokens": found.optimal_tokens,
            "ratio": found.ratio,
            "verdict": found.verdict,
            "loss": found.loss,
            "break_even_inference_tokens": found.break_even,
            "optimal_tokens_by_law": optimal_tokens(parameters),
            "sentence": found.sentence,
        }
    }


def drawn(plan: dict[str, Any]) -> dict[str, Any]:
    """What a run's report draws of a plan.json: the loss around it. Nothing where the plan has no place among the laws, or was
    written before plans had one."""
    (parameters, _), tokens = cost.parameters_of(plan), plan.get("tokens")
    if not plan.get("chinchilla") or not parameters or not tokens:
        return {}
    surface = pictures.loss_surface(parameters, tokens, SURFACE_POINTS)
    return {"pictures": {"surface": surface, "laws": pictures.laws(parameters, tokens)}}
