"""What `bessemer plan` shows of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.terminal import amount, duration, rate, size

if TYPE_CHECKING:
    from bessemer.recipe import Recipe


def print_plan(plan: dict[str, Any], recipe: Recipe) -> None:
    for name, value in plan_rows(plan, recipe).items():
        print(f"{name:<14} {value}")


def plan_rows(plan: dict[str, Any], recipe: Recipe) -> dict[str, str]:
    """A plan of this machine, a row for each thing."""
    memory = plan["memory_bytes"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory.items() if name != "total" and value)
    rows = {
        "device": f"{plan['device']} ({rate(plan['peak_flops'])})",
        "parameters": f"{amount(plan['parameters'])} ({amount(plan['parameters_by_part']['non_embedding'])} without embeddings)",
        "model": f"{recipe.model.layers} layers, width {recipe.model.width}, {recipe.model.heads} heads "
        f"({recipe.model.kv_heads} key/value), hidden {recipe.model.mlp_width}",
        "training": f"{plan['steps']:,} steps of {amount(recipe.train.global_batch_tokens or 0)} tokens = "
        f"{amount(plan['tokens'])} tokens, {plan['tokens_per_parameter']:.1f} a parameter",
        "learning rate": f"{recipe.train.optimizer.learning_rate}",
        "compute": f"{plan['total_flops']:.3g} FLOP, {plan['flops_per_token']:.3g} a token",
        "time": f"{duration(plan['seconds'])}: {plan['step_seconds']:.3g} s a step ({plan['step_seconds_from']}), "
        f"{amount(plan['tokens_per_second'])} tokens/s, MFU {plan['mfu']:.0%}{_interval(plan)}"
        + (f"; {duration(plan['validation_seconds'])} of it validation" if plan["validation_seconds"] else ""),
        "memory": f"{size(memory['total'])}: {parts}",
        "fits": "yes"
        if plan["fits"]
        else "no: this device has less free memory than that; --gpus NxDEVICE (or cluster.device) plans for others",
    }
    if standing := plan.get("chinchilla"):
        rows["scaling"] = standing["sentence"]
    if packing := plan.get("packing"):
        rows["packing"] = (
            f"{packing['packing']}: {packing['utilisation']:.1%} of the positions have a target, "
            f"{packing['cut_share']:.1%} of the documents are cut"
        )
    if epochs := plan.get("epochs"):
        rows["epochs"] = ", ".join(f"{name} {turns:.2f}" for name, turns in epochs.items())
    return rows


def _interval(plan: dict[str, Any]) -> str:
    found = plan.get("step_interval")
    return f"; between {found[0]:.3g} and {found[1]:.3g} s a step" if found else ""


SIMULATED_ROWS = {  # of the simulation to those of the plan
    "weights": ("weights",),
    "gathered": ("casts",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "average": ("average",),
    "activations": ("activations", "logits"),
    "peak": ("total",),
}


def print_simulated(found: dict[str, Any]) -> None:
    """The fullest process, part by part, beside the plan; of the others the peak."""
    fullest = max(found["stages"], key=lambda row: row["total"])
    gib = 2**30
    what = f"{amount(found['parameters'])} parameters on {found['processes']:,} processes"
    print(f"{what}; GiB of the fullest, rank {fullest['rank']}")
    print(f"{'':<12} {'between steps':>14} {'after backward':>15} {'at the peak':>12} {'planned':>9}")
    for name, parts in SIMULATED_ROWS.items():
        moments = [fullest["moments"][moment] for moment in ("between", "after_backward", "peak")]
        held = [sum(moment.values()) if name == "peak" else moment[name] for moment in moments]
        planned = sum(fullest["planned"][part] for part in parts)
        label = "all" if name == "peak" else name
        print(f"{label:<12} {held[0] / gib:>14.3f} {held[1] / gib:>15.3f} {held[2] / gib:>12.3f} {planned / gib:>9.3f}")
    for row in found["stages"]:
        if len(found["stages"]) > 1:
            print(
                f"stage {row['place']:<2} {row['blocks']:>3} blocks, at the peak {row['total'] / gib:.3f}, planned "
                f"{row['planned']['total'] / gib:.3f}"
            )
    print(
        f"simulated in {duration(sum(row['seconds'] for row in found['stages']))}; nothing of the model was allocated"
    )
