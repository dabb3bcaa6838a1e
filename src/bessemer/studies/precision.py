"""Where fp16 fails and bf16 does not: the range of each type, attention scores that overflow, gradients that vanish,
and a small training run in each.

The model is small, so that a CPU runs it in seconds, and learns to predict bytes of Python's own standard library.
What makes gradients vanish in large runs is the mean over a large global batch: here each batch of 512 tokens is
weighed as its share of BATCH_TOKENS, so that the gradients on their way back are as small as they are there. After the
backward pass the share is taken out again, so that all runs take the same updates but for rounding.
"""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model
from bessemer.studies.base import BASE, LENGTH, loss_chart
from bessemer.studies.text import study_recipe
from bessemer.terminal import text_table
from bessemer.tokens.loader import Batch
from bessemer.train.device import choose
from bessemer.train.precision import PRECISIONS, LossScale
from bessemer.train.trainer import Trainer

expected = (
    "bf16 has the range of fp32 and needs no loss scale; fp16 loses gradients below 6e-8 unless the loss is scaled "
    "(Micikevicius et al. 2018, section 3.2)."
)
BATCH_TOKENS = 524_288  # a global batch of 0.5M tokens, as GPT-3's smallest models had (Brown et al. 2020, table 2.1)
SEQUENCES, STEPS = 8, 50
SHARE = SEQUENCES * LENGTH / BATCH_TOKENS
RECIPE = {
    **BASE, "model.mlp_width": 128, "train.steps": STEPS, "train.global_batch_tokens": SEQUENCES * LENGTH,
    "train.micro_batch": SEQUENCES, "train.optimizer.learning_rate": 0.01,
}  # fmt: skip


def run() -> dict[str, Any]:
    """All four parts. Takes 10 to 30 seconds on one CPU core."""
    fp32, trained = _train("fp32", dynamic=False)
    return {
        "batch_tokens": BATCH_TOKENS,
        "ranges": ranges(),
        "scores": scores(),
        "gradients": gradients(trained),
        "runs": {
            "fp32": fp32,
            "bf16": _train("bf16", dynamic=False)[0],
            "fp16, no loss scale": _train("fp16", dynamic=False)[0],
            "fp16, dynamic loss scale": _train("fp16", dynamic=True)[0],
        },
    }


def shows(results: dict[str, Any]) -> list[str]:
    runs, gradients = results["runs"], results["gradients"]["weights"]
    apart = {name: abs((row["last"] or inf) - runs["fp32"]["last"]) for name, row in runs.items()}
    bare, scaled = "fp16, no loss scale", "fp16, dynamic loss scale"
    return [
        f"fp16 rounds {gradients['fp16']['zero']:.1%} of the weights' gradients to zero, and "
        f"{gradients['fp16, scaled by 65536']['zero']:.1%} "
        f"where the loss is scaled by 65536; bf16 {gradients['bf16']['zero']:.1%}.",
        f"After {STEPS} steps bf16 is {apart['bf16']:.3f} nats from fp32, fp16 with a dynamic loss scale "
        f"{apart[scaled]:.3f}, without one {apart[bare]:.3f}: "
        f"{'the scale is what fp16 needs' if apart[bare] > 2 * apart[scaled] else 'the scale made no difference'}.",
        f"Attention scores above 65,504 are infinite in fp16: {sum(row['fp16'] is None for row in results['scores'])} of the "
        f"{len(results['scores'])} sizes of queries and keys overflow there, "
        f"{sum(row['bf16'] is None for row in results['scores'])} in bf16.",
    ]  # fmt: skip


def plot(results: dict[str, Any]) -> str:
    return loss_chart("Loss while it trains", {name: row["losses"] for name, row in results["runs"].items()})


def ranges() -> dict[str, dict[str, float]]:
    """Largest, smallest normal and smallest subnormal value, and the distance from 1 to the next value, of each type."""
    types = {
        "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8 e4m3": torch.float8_e4m3fn,
        "fp8 e5m2": torch.float8_e5m2,
    }  # fmt: skip
    limits = {name: torch.finfo(dtype) for name, dtype in types.items()}
    rows = {name: (of.max, of.tiny, of.tiny * of.eps, of.eps) for name, of in limits.items()}
    # tf32 has fp32's 8 bits of exponent and fp16's 10 of significand (NVIDIA A100 white paper, 2020).
    tf32 = ((2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10)
    names = ("largest", "smallest_normal", "smallest", "epsilon")
    ordered = {"fp32": rows.pop("fp32"), "tf32": tf32, **rows}
    return {name: dict(zip(names, row, strict=True)) for name, row in ordered.items()}


def scores() -> list[dict[str, Any]]:
    """The largest attention score q.k (before its 1/sqrt(K)) over 128 elements, by the size of q and k."""
    draw = torch.Generator().manual_seed(0)
    q_TK, k_TK = torch.randn(64, 128, generator=draw), torch.randn(64, 128, generator=draw)
    k_TK[0] = q_TK[0]  # a query that finds itself
    rows = []
    for size in (8.0, 16.0, 24.0, 32.0):
        row: dict[str, Any] = {"rms": size}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            results = (size * q_TK).to(dtype) @ (size * k_TK).to(dtype).T
            softmax = (results * 128**-0.5).softmax(dim=1)
            row[name] = float(results.max()) if torch.isfinite(results).all() else None
            row[f"{name}_nan_rows"] = int(softmax.isnan().any(dim=1).sum())
        rows.append(row)
    return rows


def gradients(trainer: Trainer) -> dict[str, dict[str, dict[str, float]]]:
    """Shares of a real step's gradients that a type rounds to zero, keeps with fewer bits, or cannot hold.

    The gradients are fp32's, of the trained model on a batch weighed as its share of BATCH_TOKENS: those of the
    activations between the blocks, and those of the weights.
    """
    passing: list[Tensor] = []

    def keep(module: nn.Module, into: Any, out_of: Any) -> None:
        passing.append(out_of[0].flatten())

    hooks = [block.register_full_backward_hook(keep) for block in trainer.model.blocks]
    trainer.forward_backward(_batches()[0], LossScale(1.0))
    for hook in hooks:
        hook.remove()
    weights = [parameter.grad.flatten() for parameter in trainer.model.parameters() if parameter.grad is not None]
    results = {}
    for kind, tensors in (("activations", passing), ("weights", weights)):
        values = torch.cat(tensors) * SHARE
        results[kind] = {
            "fp16": _shares(values, torch.float16),
            "fp16, scaled by 65536": _shares(values * 65536.0, torch.float16),
            "bf16": _shares(values, torch.bfloat16),
        }
    return results


def _shares(values: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Of the values that are not zero."""
    values = values[values != 0]
    narrow = values.to(dtype)
    zero, subnormal = narrow == 0, (narrow != 0) & (narrow.float().abs() < torch.finfo(dtype).tiny)
    shares = {"zero": zero, "subnormal": subnormal, "infinite": narrow.isinf()}
    return {name: float(flags.double().mean()) for name, flags in shares.items()}


def _train(name: str, dynamic: bool) -> tuple[dict[str, Any], Trainer]:
    """A short run in a precision, from the same weights over the same batches. Returns its losses and its last state."""
    recipe = study_recipe("study", RECIPE)
    # Every precision takes the batch's share as its loss scale; only fp16 with a dynamic one has a factor on top.
    precision = replace(PRECISIONS[name], scaled=True)
    device = replace(choose(recipe.train), precision=precision)
    trainer = Trainer(recipe, build_model(model_config(recipe, 256), 0), device, 0, 1)
    scale, losses, lost = LossScale(2.0**16 if dynamic else 1.0), [], 0
    for number, batch in enumerate(_batches()):
        results = trainer.forward_backward(batch, LossScale(scale.value * SHARE))
        good = isfinite(results.grad_norm)
        losses.append(results.loss if isfinite(results.loss) else None)
        lost += sum(int((p.grad == 0).all()) for p in trainer.model.parameters() if p.grad is not None)
        if good:
            trainer.update(number, results.grad_norm)
        if dynamic:
            scale = scale.after(good)
    tail = [loss for loss in losses[-5:] if loss is not None]
    return {
        "losses": losses, "first": losses[0], "last": sum(tail) / len(tail) if tail else None, "steps_given_up": scale.skipped,
        "vanished": lost / (STEPS * len(list(trainer.model.parameters()))),
    }, trainer  # fmt: skip


def _batches() -> list[Batch]:
    """The same batches of bytes for every run."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "inspect", "typing"))
    data = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    starts = np.random.default_rng(0).integers(0, len(data) - LENGTH - 1, (STEPS, SEQUENCES))
    source = np.zeros(SEQUENCES, dtype=np.int64)
    return [Batch.next_token(0, np.stack([data[s : s + LENGTH + 1] for s in row]), source) for row in starts]


def table(result: dict[str, Any]) -> str:
    batch = result["batch_tokens"]
    ranges = [(name, *(f"{value:.3g}" for value in row.values())) for name, row in result["ranges"].items()]
    scores = [
        (f"{row['rms']:g}", *("inf" if row[kind] is None else f"{row[kind]:,.0f}" for kind in ("fp32", "bf16", "fp16")),
         f"{row['fp16_nan_rows']} of 64")
        for row in result["scores"]
    ]  # fmt: skip
    shares = [
        (kind, name, *(f"{100 * row[key]:.2f}%" for key in ("zero", "subnormal", "infinite")))
        for kind, types in result["gradients"].items()
        for name, row in types.items()
    ]
    runs = [
        (name, f"{row['first']:.3f}", "-" if row["last"] is None else f"{row['last']:.3f}", f"{100 * row['vanished']:.1f}%",
         str(row["steps_given_up"]))
        for name, row in result["runs"].items()
    ]  # fmt: skip
    lines = []
    for title, columns, rows, align in (
        ("What each type can hold", ("", "largest", "least normal", "least", "epsilon"), ranges, "l"),
        ("Attention scores q.k over 128 elements: the largest, by the size of q's and k's elements",
         ("RMS", "fp32", "bf16", "fp16", "rows of NaN after softmax in fp16"), scores, "l"),
        (f"Gradients of a training step, the loss being the mean over {batch:,} tokens",
         ("", "in", "become zero", "lose bits", "overflow"), shares, "ll"),
        (f"{STEPS} training steps with such gradients, same weights and batches: nats a byte",
         ("", "first", "last 5", "all zero", "given up"), runs, "l"),
    ):  # fmt: skip
        lines += [title, "", *(f"  {line}" for line in text_table(columns, rows, align)), ""]
    lines.append("all zero: gradients of whole tensors that vanished; given up: steps lost to a loss scale too large.")
    return "\n".join(lines)
