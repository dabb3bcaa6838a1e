"""What a command shows a person when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.terminal import amount, duration, rate, say, size

if TYPE_CHECKING:
    from bessemer.recipe import Recipe
    from bessemer.run import RunFolder


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


def print_columns(rows: list[dict[str, Any]]) -> None:
    """Rows of the same keys under their names, a line each."""
    rows = [{name: " ".join(str(value).split()) for name, value in row.items()} for row in rows]
    names = [name for name in (rows[0] if rows else ()) if any(row[name] != "" for row in rows)]
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in [{name: name for name in names}, *rows] if rows else []:
        print("  ".join(f"{row[name]:<{wide[name]}}" for name in names).rstrip())


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


def planned_lines(run: RunFolder) -> str:
    """The plan's step time and memory beside the measured ones, where both are known."""
    from bessemer.report import planned

    told = planned.of_run(run)
    return "\n".join(f"  {line}" for line in planned.lines(told)) if told else ""


def behind_ngram(run: RunFolder) -> str:
    """A line about a model that the byte 5-gram predicts better than, and what to do; empty where there is none."""
    from bessemer.longer import learns_by_heart, longer_command
    from bessemer.recipe import load
    from bessemer.run import read_json

    found = read_json(run.evaluation) if run.evaluation.exists() else {}
    ngram, score = found.get("ngram"), found.get("bits_per_byte")
    if ngram is None or score is None or score <= ngram["bits_per_byte"]:
        return ""
    behind = f"a byte {ngram['order']}-gram still predicts the held-out text better than this model"
    return f"{behind}; {learns_by_heart(run) or longer_command(run, load(run.recipe).train)}"


def run_screen(run: RunFolder) -> None:
    if behind := behind_ngram(run):
        say(f"\n  [yellow]{behind}[/]")
    if compared := planned_lines(run):
        say(f"\n{compared}")
    model = f"\n  model   {run.export}" if run.export.exists() else ""
    say(f"\n  report  {run.report}{model}\n  folder  {run.path}")


def demo_screen(run: RunFolder) -> None:
    """Where everything is, and what to try next."""
    from rich.markup import escape

    from bessemer.plan.cost import parameters_of
    from bessemer.run import read_json

    found, (parameters, _) = read_json(run.evaluation), parameters_of(read_json(run.plan))
    baseline = found["ngram"]
    say(f"\n[bold]A {amount(parameters or 0)}-parameter model, trained from raw text on this machine.[/]")
    if found["bits_per_byte"] is None and found.get("accuracy") is not None:
        say(f"It is right on {found['accuracy']:.1%} of the held-out text; the report shows where.")
    elif found["bits_per_byte"] is not None and baseline is not None:
        better = baseline["bits_per_byte"] - found["bits_per_byte"]
        say(
            f"It needs {found['bits_per_byte']:.3f} bits per byte for text it has not seen, "
            f"{abs(better):.3f} {'fewer' if better > 0 else 'more'} than a byte 5-gram ({baseline['bits_per_byte']:.3f})."
        )
    for sample in found["samples"][-1:]:
        say("\n[dim]It writes, after the bold:[/]")
        say("  [bold]" + escape(sample["prompt"]) + "[/]" + escape(sample["text"].rstrip()).replace("\n", "\n  "))
    kind = {"masked": "MaskedLM", "classify": "SequenceClassification"}.get(found.get("objective"), "CausalLM")
    exported = run.export.exists()
    say(
        f"\n{planned_lines(run)}"
        f"\n  report   {run.report}   open it in a browser"
        + (f"\n  model    {run.export}   AutoModelFor{kind}.from_pretrained({str(run.export)!r})" if exported else "")
        + f"\n  folder   {run.path}   recipe, corpus, tokens, checkpoints, metrics"
        "\n\n[bold]Try next[/]"
        + (f"\n  bessemer generate {run.path} 'import os' --temperature 0.5" if kind == "CausalLM" else "")
        + f"\n  bessemer trace {run.path} --step 100          which documents step 100 read"
        "\n  bessemer demo --set run.name=longer --set train.minutes=20"
        "\n  bessemer recipe demo > my.toml                make it yours, then: bessemer run my.toml"
    )
