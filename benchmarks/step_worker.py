"""One side of step_cpu.py: builds a model, then takes training steps on request from standard input.

For each line "N" it takes N steps and answers with JSON: their seconds, and the peak resident bytes of the process since its
first steps, so that a compiler's memory does not count. The first line of output is JSON with facts about the side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

VOCABULARY, LENGTH, SEQUENCES = 8192, 256, 16
LAYERS, WIDTH, HEADS, MLP = 6, 384, 6, 1024
EXPERTS, CHOSEN = 8, 2  # of the sparse sides: experts, and those of a token, which have MLP hidden units together

Take = Callable[[int], list[float]]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and targets. Sparse sides need other tokens in each step: their experts' loads then vary too."""
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(step: Callable[[], Any]) -> Take:
    def take(steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = perf_counter()
            step()
            seconds.append(perf_counter() - started)
        return seconds

    return take


def narrowed(precision: str) -> contextlib.AbstractContextManager[object]:
    """Return bf16 autocast if asked for, as the peers' own training scripts use around the forward pass."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def bessemer(micro_batch: int, compiled: bool, precision: str, is_sparse: bool = False) -> tuple[Take, dict[str, Any]]:
    import numpy as np
    from planned import plan_of

    from bessemer.model.flops import flops_per_token
    from bessemer.model.huggingface.config import model_config
    from bessemer.model.recipe_defaults import MICRO_BATCH_TOKENS_ON, resolve
    from bessemer.model.transformer import build_model
    from bessemer.recipe import parse
    from bessemer.tokens.loader import Batch
    from bessemer.train import device as devices
    from bessemer.train.trainer import Trainer

    micro = f"micro_batch={micro_batch}" if micro_batch else ""
    mlp = f"mlp_width = {MLP}"
    if is_sparse:
        mlp = f"experts = {EXPERTS}\nexperts_per_token = {CHOSEN}\nexpert_width = {MLP // CHOSEN}"
    asked = parse(
        f"""
            run.name = "benchmark"
            tokens.sequence_length = {LENGTH}
            [model]
            layers = {LAYERS}
            width = {WIDTH}
            heads = {HEADS}
            {mlp}
            qk_norm = "none"
            tie_embeddings = true
            [train]
            steps = 1000
            device = "cpu"
            precision = "{precision}"
            compile = "{"on" if compiled else "off"}"
            global_batch_tokens = {SEQUENCES * LENGTH}
            {micro}
            """,
        "benchmark",
    )
    recipe = resolve(asked, VOCABULARY, micro_batch_tokens=MICRO_BATCH_TOKENS_ON[False])
    devices.keep_freed_memory()
    config = model_config(recipe, VOCABULARY)
    device = devices.choose(recipe.train)
    plan = plan_of(recipe, config, device)
    trainer = Trainer(recipe, build_model(config, 0), device, 0, 1)
    numbers = count()

    def step() -> None:
        inputs, targets = batch(next(numbers))
        tokens = torch.cat([inputs, targets[:, -1:]], dim=1).numpy()
        data = Batch.next_token(0, tokens, np.zeros(SEQUENCES, dtype=np.int64))
        trainer.update(0, trainer.forward_backward(data).grad_norm)

    facts = {
        "parameters": config.parameters,
        "flops_per_token": flops_per_token(config),
        "micro_batch": recipe.train.micro_batch,
        "plan": plan,
    }
    return timed(step), facts


def nanogpt(checkout: str, compiled: bool, precision: str) -> tuple[Take, dict[str, Any]]:
    sys.path.insert(0, checkout)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(LENGTH, VOCABULARY, LAYERS, HEADS, WIDTH, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    for group in optimizer.param_groups:  # its own setting is fused on CUDA only
        group["fused"] = True
    parameters = sum(p.numel() for p in model.parameters())
    if compiled:
        model = torch.compile(model)
    inputs, targets = batch()

    def step() -> None:
        with narrowed(precision):
            _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step), {"parameters": parameters}


def litgpt(compiled: bool, precision: str) -> tuple[Take, dict[str, Any]]:
    import lightning
    from litgpt import GPT, Config  # type: ignore[import-not-found]
    from litgpt.utils import chunked_cross_entropy  # type: ignore[import-not-found]

    config = Config(
        block_size=LENGTH, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=LAYERS, n_head=HEADS,
        n_embd=WIDTH, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=MLP,
    )  # fmt: skip
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true"
    )
    fabric.launch()
    model = GPT(config)
    parameters = sum(p.numel() for p in model.parameters())
    if compiled:  # as in its pretrain.py
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    inputs, targets = batch()

    def step() -> None:
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step), {"parameters": parameters}


def llama(is_sparse: bool = False) -> Any:
    """Return the transformers model of the Hugging Face sides: Llama, or Qwen3-MoE."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True, "use_cache": False,
    }  # fmt: skip
    if not is_sparse:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": MLP // CHOSEN}
    options = {"head_dim": WIDTH // HEADS, "norm_topk_prob": True, "output_router_logits": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts, **options))


def bare(compiled: bool, precision: str, is_sparse: bool = False) -> tuple[Take, dict[str, Any]]:
    """Return the side that trains the transformers model in a plain loop."""
    model = llama(is_sparse)
    parameters = sum(p.numel() for p in model.parameters())
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    numbers = count()

    def step() -> None:
        inputs, _ = batch(next(numbers))
        with narrowed(precision):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step), {"parameters": parameters}


def trainer(compiled: bool, precision: str) -> tuple[Take, dict[str, Any]]:
    import tempfile

    import transformers

    model = llama()
    inputs, _ = batch()
    rows = [{"input_ids": row, "labels": row} for row in inputs] * 4

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            self.ends.append(perf_counter())

    def take(steps: int) -> list[float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=steps + 1, per_device_train_batch_size=SEQUENCES, use_cpu=True, report_to=[],
                learning_rate=1e-4, weight_decay=0.1, optim="adamw_torch_fused", logging_strategy="no",
                save_strategy="no", disable_tqdm=True, max_grad_norm=1.0, dataloader_pin_memory=False,
                torch_compile=compiled, bf16=precision == "bf16",
            )  # fmt: skip
            transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()
        # Each time is from the end of one step to the end of the next. The first step, which starts the loop, is not counted.
        return [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:], strict=False)]

    return take, {"parameters": sum(p.numel() for p in model.parameters())}


def peak_resident() -> int:
    """Return the peak resident bytes since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


SIDES = ("bessemer", "nanogpt", "litgpt", "bare", "trainer")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--micro-batch", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sparse", action="store_true", help="a mixture of experts; sides: bessemer and bare")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print to standard output; answers must be alone on it
    if given.side == "bessemer":
        take, facts = bessemer(given.micro_batch, given.compile, given.precision, given.sparse)
    elif given.side == "nanogpt":
        take, facts = nanogpt(str(given.nanogpt), given.compile, given.precision)
    elif given.side == "bare":
        take, facts = bare(given.compile, given.precision, given.sparse)
    else:
        take, facts = {"litgpt": litgpt, "trainer": trainer}[given.side](given.compile, given.precision)
    print(json.dumps({**facts, "torch": torch.__version__}), file=answers, flush=True)
    first = True
    for line in sys.stdin:
        seconds = take(int(line))
        if first:
            forget_peak()
            first = False
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_resident()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
