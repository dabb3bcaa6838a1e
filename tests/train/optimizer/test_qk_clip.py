"""QK-clip against the paper's formulas in float64, over micro-batches, processes, precisions and a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from bessemer import preflight
from bessemer.errors import InputError
from bessemer.model import attention
from bessemer.model.attention import AttentionScope, AttentionSpec, Documents, largest_logits
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model, meta_model
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Parallel, Recipe, load
from bessemer.recipe.load import parse
from bessemer.run import RunFolder
from bessemer.tokens.loader import Batch
from bessemer.train.device import choose
from bessemer.train.split import initial_weights
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.parallel.processes import run_on
from tests.train.test_trainer import batch, trainer_of

TAU = 4.8  # of the heads of these models, some are above it
NO_NORM = ("model.qk_norm=none", "model.heads=4", "model.kv_heads=2")
CLIPPED = f"train.optimizer.qk_clip={TAU}"
SPECS = [AttentionSpec(), AttentionSpec(causal=False), AttentionSpec(window=20), AttentionSpec(causal=False, window=30),
         AttentionSpec(scale=0.7)]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("packed", [False, True])
def test_largest_logits_are_those_of_the_full_matrix(
    spec: AttentionSpec, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LOGIT_CHUNK", 32)
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 100, 8, generator=draw), torch.randn(2, 2, 100, 8, generator=draw)
    tokens = torch.randint(0, 9, (2, 100), generator=draw)
    documents = Documents.from_tokens(tokens, 0) if packed else None
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) * (spec.scale or 8**-0.5)
    wanted = np.full(4, -np.inf)
    for b in range(2):
        for i in range(100):
            for j in range(100):
                if spec.causal:
                    seen = j <= i and (not spec.window or i - j < spec.window)
                else:
                    seen = not spec.window or abs(i - j) <= spec.window // 2
                low, high = min(i, j), max(i, j)
                if seen and not (packed and bool((tokens[b, low:high] == 0).any())):
                    wanted = np.maximum(wanted, scores[b, :, i, j].numpy())
    found = largest_logits(q, k, AttentionScope.of(spec, documents, 100, torch.device("cpu")))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)


def logits_by_hand(trainer: Trainer, data: Batch) -> np.ndarray:
    """The largest visible logit by layer and head, in float64, from the inputs of each attention in a pass of its own."""
    largest: list[Tensor] = []

    def caught(module: Any, arguments: tuple[Any, ...], out: Tensor) -> None:
        x, rotation = arguments[:2]
        q, k, _ = module.queries_keys_values(x, rotation)
        scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3)
        hidden = ~torch.ones(32, 32, dtype=torch.bool).tril()
        largest.append((scores / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).amax(dim=(0, 2, 3)))

    hooks = [block.attention.register_forward_hook(caught) for block in trainer.model.blocks]
    with torch.no_grad():
        trainer.model(torch.from_numpy(data.inputs))
    for hook in hooks:
        hook.remove()
    return torch.stack(largest).numpy()


def step(trainer: Trainer, data: Batch, number: int = 0) -> dict[str, np.ndarray]:
    """The weights after a step, in float64."""
    trainer.update(number, trainer.forward_backward(data).grad_norm)
    return {name: weight.detach().double().numpy() for name, weight in trainer.model.named_parameters()}


@pytest.mark.parametrize("rule", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_step_by_hand(recipe_file: Path, rule: str, kv_heads: int) -> None:
    """From the step without it: queries and keys times sqrt(tau / S), or where keys are shared queries times tau / S."""
    overrides = ("model.qk_norm=none", "model.heads=4", f"model.kv_heads={kv_heads}", "model.qkv_bias=true", "train.micro_batch=2",
                 "train.precision=fp64", f"train.optimizer.kind={rule}")  # fmt: skip
    plain, clipping = trainer_of(recipe_file, *overrides), trainer_of(recipe_file, *overrides, CLIPPED)
    data = batch()
    logits = logits_by_hand(plain, data)
    above = logits > TAU
    assert 0 < above.sum() < above.size, "some heads are clipped and some are not"
    wanted, found = step(plain, data), step(clipping, data)
    assert clipping.qk_clip is not None
    np.testing.assert_allclose(clipping.qk_clip.largest_LH.numpy(), logits, rtol=1e-12)
    assert clipping.qk_clip.figures().tolist() == [pytest.approx(logits.max(), rel=1e-12), above.sum()]
    for name, weight in wanted.items():
        if "attention.qkv" in name:
            layer = int(name.split(".")[1])
            for head in range(4):
                gamma = min(1.0, TAU / logits[layer, head])
                group, place = divmod(head, 4 // kv_heads)
                weight[group, place] *= gamma**0.5 if kv_heads == 4 else gamma
                if kv_heads == 4:
                    weight[group, 1] *= gamma**0.5
        np.testing.assert_allclose(found[name], weight, rtol=1e-12, atol=1e-12, err_msg=name)


def test_logits_of_clipped_weights_reach_the_threshold(recipe_file: Path) -> None:
    """In the first block, whose input does not depend on clipped weights: a head above tau comes to tau, the others stay."""
    trainer = trainer_of(recipe_file, *NO_NORM, CLIPPED, "train.precision=fp64", "train.optimizer.learning_rate=1e-30")
    data = batch()
    before = logits_by_hand(trainer, data)
    step(trainer, data)
    np.testing.assert_allclose(logits_by_hand(trainer, data)[0], np.minimum(before[0], TAU), rtol=1e-9)


def test_a_high_threshold_changes_no_bit_and_validation_is_not_measured(recipe_file: Path) -> None:
    plain, watched = trainer_of(recipe_file, *NO_NORM), trainer_of(recipe_file, *NO_NORM, "train.optimizer.qk_clip=1e9")
    data = batch()
    expected, found = step(plain, data), step(watched, data)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert watched.qk_clip is not None
    measured = watched.qk_clip.largest_LH
    watched.model.blocks[0].attention.qkv.data.mul_(100)
    watched.model(torch.from_numpy(data.inputs))
    watched.qk_clip.clip(watched.model)
    assert watched.qk_clip.largest_LH is measured and watched.qk_clip.num_clipped == 0


MODES = ["train.precision=bf16", "train.recompute=full", "train.recompute=selective tokens.document_mask=true",
         "train.dropout.attention=0.1", "train.compile=on", "train.compile=on train.recompute=full"]  # fmt: skip


@pytest.mark.parametrize("mode", long_but(MODES, *MODES[:4]))
def test_logits_are_measured_in_every_precision_and_mode(recipe_file: Path, mode: str) -> None:
    data = batch()
    trainer = trainer_of(recipe_file, *NO_NORM, CLIPPED, *mode.split())
    wanted = logits_by_hand(trainer_of(recipe_file, *NO_NORM), data)
    step(trainer, data)
    assert trainer.qk_clip is not None and trainer.qk_clip.num_clipped == (wanted > TAU).sum()
    # The last block's input has gone through dropout.
    np.testing.assert_allclose(trainer.qk_clip.largest_LH[0], wanted[0], rtol=0.02 if "bf16" in mode else 1e-5)
    assert all(len(seen) == 8 // (trainer.settings.micro_batch or 8) for seen in trainer.qk_clip._seen.values())


def test_a_skipped_step_and_infinite_logits_scale_nothing(recipe_file: Path) -> None:
    trainer = trainer_of(recipe_file, *NO_NORM, CLIPPED)
    clip = trainer.qk_clip
    assert clip is not None
    step(trainer, batch())
    assert clip.num_clipped > 0
    trainer.forward_backward(batch())  # and no update
    assert clip.figures()[1] == 0
    before = copy.deepcopy(trainer.model.state_dict())
    clip.largest_LH = torch.full_like(clip.largest_LH, torch.inf)
    clip.clip(trainer.model)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_a_step_that_the_device_holds_back_scales_nothing(recipe_file: Path) -> None:
    trainer = trainer_of(recipe_file, *NO_NORM, CLIPPED)
    clip = trainer.qk_clip
    assert clip is not None
    trainer.forward_backward(batch())
    before = copy.deepcopy(trainer.model.state_dict())
    clip.clip(trainer.model, torch.tensor(1.0))
    assert clip.figures()[1] == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    clip.clip(trainer.model, torch.tensor(0.0))
    assert clip.figures()[1] > 0
    assert not torch.equal(trainer.model.state_dict()["blocks.0.attention.qkv"], before["blocks.0.attention.qkv"])


def test_what_cannot_be_clipped_is_refused_before_the_corpus_is_read(recipe_file: Path, tmp_path: Path) -> None:
    def check(*overrides: str) -> None:
        preflight.check(load(recipe_file, [CLIPPED, *overrides]), RunFolder(tmp_path / "run"), str(recipe_file))

    check("model.qk_norm=none")
    for qk_norm in ("head", "full"):
        with pytest.raises(
            InputError, match=f'qk_clip: with model.qk_norm = "{qk_norm}" .* leave qk_clip out, or take'
        ):
            check(f"model.qk_norm={qk_norm}")
    with pytest.raises(InputError, match="attention_soft_cap = 50 bounds the logits already"):
        check("model.qk_norm=none", "model.attention_soft_cap=50")
    with pytest.raises(InputError, match="with model.qk_norm"):
        trainer_of(recipe_file, CLIPPED)
    with pytest.raises(InputError, match="classify.frozen keeps as they are"):
        load(recipe_file, [CLIPPED, "train.objective=classify", "train.classify.frozen=true"])
    for value in ("0", "-1"):
        with pytest.raises((InputError, ValidationError), match="greater than 0|qk_clip"):
            load(recipe_file, [f"train.optimizer.qk_clip={value}"])


LENGTH, ROWS = 16, 8


def recipe_of(kv_heads: int, **train: Any) -> Recipe:
    text = f"""
[run]
name = "t"
[model]
layers = 2
width = 32
heads = 4
kv_heads = {kv_heads}
mlp_width = 64
qk_norm = "none"
qkv_bias = true
[tokens]
sequence_length = {LENGTH}
"""
    recipe = parse(text, "test")
    optimizer = recipe.train.optimizer.changed(learning_rate=1e-2, betas=(0.9, 0.95), qk_clip=3.6)
    settings = {"steps": 4, "global_batch_tokens": ROWS * LENGTH, "micro_batch": 1, "precision": "fp64", **train}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={**settings, "optimizer": optimizer})})


def trained(recipe: Recipe, mesh: ProcessMesh) -> dict[str, Any]:
    """Three steps: measured logits and clipped heads of each, and the weights at the end."""
    config = model_config(recipe, 64)
    model = build_model(config, 3) if mesh.is_single else meta_model(config)
    trainer = Trainer(recipe, model, choose(recipe.train), 0, 2, mesh, initial_weights(config, 3))
    assert trainer.qk_clip is not None
    draw, steps = np.random.default_rng(0), []
    for number in range(3):
        data = Batch.next_token(number * ROWS, draw.integers(0, 64, (ROWS, LENGTH + 1)), np.zeros(ROWS, dtype=np.int64))
        part = data.part(mesh.data_rank, mesh.layout.data)
        trainer.update(number, trainer.forward_backward(part).grad_norm)
        steps.append((trainer.qk_clip.largest_LH.numpy(), int(trainer.qk_clip.num_clipped)))
    weights = {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().numpy()
        for name, weight in owned_parameters(trainer.model)
    }
    return {"steps": steps, "weights": weights}


def on_processes(layout: Parallel, recipes: list[Recipe]) -> list[dict[str, Any]]:
    mesh = join(layout, torch.device("cpu"))
    return [trained(recipe.model_copy(update={"parallel": layout}), mesh) for recipe in recipes]


LAYOUTS = {
    "dp2": Parallel(replicate=2), "tp2": Parallel(tensor=2), "zero3": Parallel(shard=2), "zero1": Parallel(shard=2, zero=1),
    "offload": Parallel(shard=2, offload=True), "cp2": Parallel(context=2), "pp2": Parallel(pipeline=2),
    "zbv": Parallel(pipeline=2, schedule="zbv"), "fsdp2 tp2": Parallel(shard=2, tensor=2),
}  # fmt: skip


@pytest.mark.parametrize("name", long_but(list(LAYOUTS), "dp2", "tp2"))
def test_several_processes_clip_as_one(name: str) -> None:
    recipes = [recipe_of(2), recipe_of(4)]
    if name == "zbv":
        recipes = [recipe.changed(model=recipe.model.changed(layers=4)) for recipe in recipes]
    alone = [trained(recipe, SINGLE_PROCESS) for recipe in recipes]
    assert all(0 < run["steps"][0][1] < run["steps"][0][0].size for run in alone), (
        "some heads are clipped and some are not"
    )
    layout = LAYOUTS[name]
    for results in run_on(layout.world, on_processes, layout, recipes):
        for expected, result in zip(alone, results, strict=True):
            for (wanted, clipped), (found, num_clipped) in zip(expected["steps"], result["steps"], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-9)
                assert num_clipped == clipped
            for parameter, values in result["weights"].items():
                np.testing.assert_allclose(values, expected["weights"][parameter], rtol=0, atol=1e-9, err_msg=parameter)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2", "cp2"])
def test_compiled_blocks_of_several_processes_clip_as_one(name: str) -> None:
    layout, compiled = LAYOUTS[name], recipe_of(2, precision="fp32", compile="on", recompute="full")
    alone = trained(recipe_of(2, precision="fp32", compile="off"), SINGLE_PROCESS)
    for (result,) in run_on(layout.world, on_processes, layout, [compiled]):
        for (wanted, clipped), (found, num_clipped) in zip(alone["steps"], result["steps"], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4)
            assert num_clipped == clipped
