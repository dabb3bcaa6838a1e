"""Training step on one GPU in bf16 with document masking: tokens/s, MFU, peak memory, seconds to the first step.

    python benchmarks/step_gpu.py --nanochat CHECKOUT --litgpt-python PYTHON --json FILE
    python benchmarks/step_gpu.py --tiny                        the same code on any machine, with tiny models

Every case runs twice, each time in a fresh process, with its own torch.compile cache: the first run starts cold, the second warm,
as a restarted training does. Whole steps are timed (from data on the host to updated weights and the loss read back), after three
warm-up steps. A case that the recipe rejects or that does not fit is reported, and the other cases still run.

MFU is relative to the published dense bf16 peak, also for fp8. Its FLOPs are 6 per token and multiplied parameter plus attention
inside the documents; `mfu_causal` counts attention over the causal half of the whole sequence. nanochat trains another model
(value embeddings, relu^2, Muon) of the same depth and width and counts its own FLOPs. litgpt trains the same dimensions, and so
does the plain side: a Llama in two dozen lines of torch, compiled, with autocast and torch's fused AdamW. None of them masks
documents.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import describe

# name: layers, width, heads, key/value heads, MLP width, vocabulary, sequences per micro-batch, micro-batches per step
SIZES = {
    "0.5B": (24, 1280, 10, 10, 3456, 32_768, 8, 4),
    "1.3B": (24, 2048, 16, 16, 5504, 32_768, 4, 4),
    "3B": (26, 3072, 24, 24, 8192, 32_768, 2, 4),
    "8B": (32, 4096, 32, 8, 14_336, 128_256, 1, 4),
    "tiny": (2, 64, 2, 1, 128, 512, 2, 2),
}
CASES = {
    "0.5B": ("0.5B", ()),
    "0.5B plain": ("0.5B", ()),
    "1.3B": ("1.3B", ()),
    "1.3B plain": ("1.3B", ()),
    "3B": ("3B", ()),
    "0.5B fp8": ("0.5B", ("train.precision=fp8",)),
    "1.3B fp8": ("1.3B", ("train.precision=fp8",)),
    "3B fp8": ("3B", ("train.precision=fp8",)),
    "8B 8bit": ("8B", ("train.recompute=full", "train.optimizer.state=8bit")),
    "8B fp32": ("8B", ("train.recompute=full",)),  # moments in fp32: 16 bytes per parameter
}
MEAN_DOCUMENT = 1000  # tokens: about the average document of web text
WARM_UP = 3
Step = Callable[[], object]


def batch(size: str, length: int) -> np.ndarray:
    """Return random tokens of a step, (sequences, length + 1), with end-of-text (id 0) at geometric distances."""
    *_, vocabulary, micro, passes = SIZES[size]
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, vocabulary, (micro * passes, length + 1))
    tokens[draw.random(tokens.shape) < 1 / min(MEAN_DOCUMENT, length // 4)] = 0
    return tokens


def mean_context(tokens: np.ndarray) -> float:
    """Return the mean number of tokens that a token attends to in its document, including itself."""
    inputs = tokens[:, :-1]
    starts = np.zeros_like(inputs, dtype=bool)
    starts[:, 0] = True
    starts[:, 1:] = inputs[:, :-1] == 0
    index = np.arange(inputs.shape[1])
    return float((index - np.maximum.accumulate(np.where(starts, index, 0), axis=1) + 1).mean())


def bessemer(size: str, length: int, overrides: tuple[str, ...], tiny: bool) -> tuple[Step, dict[str, Any]]:
    from planned import plan_of

    from bessemer.model.flops import flops_per_token
    from bessemer.model.huggingface.config import model_config
    from bessemer.model.recipe_defaults import resolve
    from bessemer.model.transformer import build_model
    from bessemer.recipe import parse
    from bessemer.tokens.loader import Batch
    from bessemer.train import device as devices
    from bessemer.train.trainer import Trainer

    layers, width, heads, kv_heads, mlp, vocabulary, micro, passes = SIZES[size]
    text = f"""
        run.name = "benchmark"
        [tokens]
        sequence_length = {length}
        document_mask = true
        [model]
        layers = {layers}
        width = {width}
        heads = {heads}
        kv_heads = {kv_heads}
        mlp_width = {mlp}
        [train]
        steps = 1000
        device = "{"auto" if tiny else "cuda"}"
        precision = "{"fp32" if tiny else "bf16"}"
        micro_batch = {micro}
        global_batch_tokens = {micro * passes * length}
        """
    recipe = resolve(parse(text, "benchmark", list(overrides)), vocabulary)
    config = model_config(recipe, vocabulary)
    device = devices.choose(recipe.train)
    plan = plan_of(recipe, config, device)
    trainer = Trainer(recipe, build_model(config, 0), device, 0, 1)
    tokens = batch(size, length)
    data = Batch.next_token(0, tokens, np.zeros(len(tokens), dtype=np.int64))
    causal = flops_per_token(config)
    attention = 12 * config.layers * config.heads * config.head_dim
    facts = {
        "parameters": config.parameters,
        "flops_causal": causal,
        "plan": plan,
        "flops": causal - attention * ((length + 1) / 2 - mean_context(tokens)),
    }
    return lambda: trainer.update(0, trainer.forward_backward(data).grad_norm), facts


def nanochat(checkout: str, size: str, length: int, tiny: bool) -> tuple[Step, dict[str, Any]]:
    sys.path.insert(0, checkout)
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    layers, width, heads, kv_heads, _, vocabulary, micro, passes = SIZES[size]
    with torch.device("meta"):
        model = GPT(GPTConfig(length, vocabulary, layers, heads, kv_heads, width, window_pattern="L"))
    model.to_empty(device=place())
    model.init_weights()
    optimizer = model.setup_optimizer()
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "flops": float(model.estimate_flops())}
    run = model if tiny else torch.compile(model, dynamic=False)
    tokens = torch.from_numpy(batch(size, length))

    def step() -> float:
        total = 0.0
        for part in tokens.split(micro):
            part = part.to(place(), non_blocking=True)
            loss = run(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            (loss / passes).backward()
            total += loss.detach()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return float(total)

    return step, facts


def litgpt(size: str, length: int, tiny: bool) -> tuple[Step, dict[str, Any]]:
    import lightning
    from litgpt import GPT, Config  # type: ignore[import-not-found]
    from litgpt.utils import chunked_cross_entropy  # type: ignore[import-not-found]

    layers, width, heads, kv_heads, mlp, vocabulary, micro, passes = SIZES[size]
    config = Config(
        block_size=length, vocab_size=vocabulary, padded_vocab_size=vocabulary, n_layer=layers, n_head=heads,
        n_query_groups=kv_heads, n_embd=width, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=mlp,
    )  # fmt: skip
    fabric = lightning.Fabric(accelerator="auto", devices=1, precision="32-true" if tiny else "bf16-mixed")
    fabric.launch()
    model = GPT(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - vocabulary * width
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": 6.0 * matrices + 12 * layers * width * (length + 1) / 2,
    }
    model = fabric.setup(model if tiny else torch.compile(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    tokens = torch.from_numpy(batch(size, length))

    def step() -> float:
        total = 0.0
        for number, part in enumerate(tokens.split(micro)):
            part = part.to(place(), non_blocking=True)
            with fabric.no_backward_sync(model, enabled=number + 1 < passes):
                loss = chunked_cross_entropy(model(part[:, :-1].contiguous()), part[:, 1:].contiguous())
                fabric.backward(loss / passes)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step, facts


class PlainBlock(torch.nn.Module):
    """Attention with rotary positions and grouped keys, and SwiGLU, written directly from the Llama paper."""

    def __init__(self, width: int, heads: int, kv_heads: int, mlp: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate_up, self.down = torch.nn.Linear(width, 2 * mlp, bias=False), torch.nn.Linear(mlp, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        joined = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = joined.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (each.chunk(2, -1) for each in (q, k))
        )
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def plain(size: str, length: int, tiny: bool) -> tuple[Step, dict[str, Any]]:
    layers, width, heads, kv_heads, mlp, vocabulary, micro, passes = SIZES[size]
    with place():
        embedding, head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary, bias=False)
        blocks = torch.nn.ModuleList(PlainBlock(width, heads, kv_heads, mlp) for _ in range(layers))
        norm = torch.nn.RMSNorm(width, eps=1e-6)
        angles = torch.arange(length)[:, None] * 10_000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    model = torch.nn.ModuleList([embedding, blocks, norm, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = embedding(inputs)
        for block in blocks:
            x = block(x, cos, sin)
        return torch.nn.functional.cross_entropy(head(norm(x)).flatten(0, 1).float(), targets.flatten())

    compiled = loss_of if tiny else torch.compile(loss_of)
    tokens = torch.from_numpy(batch(size, length))

    def step() -> float:
        total = 0.0
        for part in tokens.split(micro):
            part = part.to(place(), non_blocking=True)
            with torch.autocast(place().type, dtype=torch.bfloat16):
                loss = compiled(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            (loss / passes).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - vocabulary * width
    return step, {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": 6.0 * matrices + 12 * layers * width * (length + 1) / 2,
    }


def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in this process: facts, seconds of the first step and of later ones, peak bytes."""
    began = perf_counter()
    name, size, *overrides = given.case
    length = 128 if given.tiny else 4096
    if name == "bessemer":
        step, facts = bessemer(size, length, tuple(overrides), given.tiny)
    elif name == "plain":
        step, facts = plain(size, length, given.tiny)
    elif name == "nanochat":
        step, facts = nanochat(given.nanochat, size, length, given.tiny)
    else:
        step, facts = litgpt(size, length, given.tiny)
    cuda = torch.cuda.is_available()
    seconds = []
    built = perf_counter()
    for _ in range(WARM_UP + given.steps):
        started = perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
        if cuda and len(seconds) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
    *_, micro, passes = SIZES[size]
    return {
        **facts,
        "tokens_per_step": micro * passes * length,
        "build_seconds": built - began,
        "first_step_seconds": seconds[0],
        "seconds": seconds[WARM_UP:],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }


def run(python: str, case: list[str], given: argparse.Namespace, cache: str) -> dict[str, Any]:
    command = [python, __file__, "--steps", str(given.steps), "--case", *case]
    command += ["--tiny"] if given.tiny else []
    command += ["--nanochat", given.nanochat] if given.nanochat else []
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--set", nargs="*", default=[], help="further recipe keys for Bessemer's cases, KEY=VALUE")
    parser.add_argument("--nanochat", help="checkout of nanochat; runs in this Python")
    parser.add_argument("--litgpt-python", help="Python with litgpt")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--once", action="store_true", help="run each case once, with a cold cache")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device, without compile")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(measure(given)))
        return
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --tiny runs the same code on a CPU")
    cases = (
        {"tiny": ("tiny", ()), "tiny plain": ("tiny", ())}
        if given.tiny
        else {name: CASES[name] for name in given.cases or CASES}
    )
    sides = []
    for name, (size, overrides) in cases.items():
        if name.endswith(" plain"):
            sides.append((name, sys.executable, ["plain", size]))
            continue
        sides.append((f"Bessemer {name}", sys.executable, ["bessemer", size, *overrides, *given.set]))
        if not overrides and given.nanochat:
            sides.append((f"nanochat {name}", sys.executable, ["nanochat", size]))
        if not overrides and given.litgpt_python:
            sides.append((f"litgpt {name}", given.litgpt_python, ["litgpt", size]))
    from planned import beside, print_beside

    from bessemer.plan.devices import peak_flops

    rows: list[dict[str, Any]] = []
    print(f"{'case':<22} {'tokens/s':>10} {'MFU':>6} {'peak GB':>8} {'first step, cold':>17} {'warm':>6}")
    for name, python, case in sides:
        with tempfile.TemporaryDirectory() as cache:
            cold = run(python, case, given, cache)
            warm = cold if given.once else run(python, case, given, cache)
        row: dict[str, Any] = {"case": name, "cold": cold, "warm": warm}
        rows.append(row)
        keep(given, rows)
        if "failed" in cold or "failed" in warm:
            print(f"{name:<22} failed: {cold.get('failed') or warm.get('failed')}")
            continue
        rate = warm["tokens_per_step"] / median(warm["seconds"])
        peak = peak_flops(warm["device"])
        row["tokens_per_second"] = rate
        if peak:
            for share_of, counted in (("mfu", "flops"), ("mfu_causal", "flops_causal")):
                row[share_of] = rate * warm[counted] / peak if counted in warm else None
        share = f"{row['mfu']:.1%}" if peak else "-"
        print(
            f"{name:<22} {rate:>10,.0f} {share:>6} {warm['peak_bytes'] / 1e9:>8.1f} "
            f"{cold['first_step_seconds']:>15.1f} s {warm['first_step_seconds']:>4.1f} s"
        )
        if "plan" in warm:
            row["planned_against_measured"] = beside(warm["plan"], warm["seconds"], warm["peak_bytes"])
            print_beside(name, row["planned_against_measured"])
    keep(given, rows)


def keep(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the results so far, so that a run that times out keeps the cases it measured."""
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(steps=given.steps), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
