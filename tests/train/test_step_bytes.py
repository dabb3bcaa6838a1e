"""Memory and collectives of a step equal their formulas: on fake tensors, and on two processes."""

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bessemer.common.errors import InputError
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.memory import checkpointed_elements_per_block, mask_bytes, peak_memory, rank_memory
from bessemer.distributed.mesh import SINGLE_PROCESS, join
from bessemer.distributed.stages import pipeline_ranks
from bessemer.distributed.step_flops import recomputed_flops_per_token
from bessemer.model import kernels as product
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import Dropout, Parallel, Recipe, Train, parse
from bessemer.recipe.model import ENCODERS
from bessemer.train import parallelize, recompute
from bessemer.train import precision as precisions
from bessemer.train.device import choose
from bessemer.train.task import config_of, task_of
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.train.fake_step import StepBytes, simulate, watch_step
from tests.train.small_trainer import batch, stats_of, trainer_of

TEXT = """
run = {name = "t"}
model = {layers = 4, width = 128, heads = 4, kv_heads = 2, mlp_width = 384}
tokens = {sequence_length = 64, document_mask = false}
train = {steps = 4, global_batch_tokens = 1024, micro_batch = 2, device = "cpu"}
"""
SPARSE = TEXT.replace("mlp_width = 384", 'family = "qwen3_moe", experts = 8, experts_per_token = 2, expert_width = 192')
VOCABULARY = 512
BF16 = ElementBytes(2, cast=2)


def recipe_of(layout: Parallel, text: str = TEXT, **train: Any) -> tuple[Recipe, ModelConfig]:
    """Return a resolved recipe, with two micro-batches without a pipeline, and its model."""
    resolved = recipe_defaults.resolve(parse(text, "test"), VOCABULARY)
    batch = 64 * 2 * 2 * layout.data if layout.pipeline == 1 else 1024
    changed = resolved.train.model_copy(update={"recompute": "full", "global_batch_tokens": batch, **train})
    recipe = resolved.model_copy(update={"parallel": layout, "train": changed})
    return recipe, config_of(recipe, VOCABULARY, 0)


LAYOUTS = {
    "zero1": Parallel(shard=2, zero=1),
    "zero3": Parallel(shard=2),
    "hsdp": Parallel(replicate=2, shard=2),
    "tp2": Parallel(tensor=2),
    "cp2": Parallel(context=2),
    "pp2": Parallel(pipeline=2),
    "fsdp2 tp2": Parallel(shard=2, tensor=2),
    "fsdp2 pp2": Parallel(shard=2, pipeline=2),
    # 5 divides no dimension of `qkv` and `gate_up`, 3 none of `qkv`.
    "uneven": Parallel(shard=5),
    "uneven zero1": Parallel(shard=5, zero=1),
    "uneven zero2": Parallel(shard=3, zero=2),
    "muon": Parallel(shard=4),
}


def sent_by_rings(layout: Parallel, config: ModelConfig, weight: int) -> dict[str, int]:
    """Return the bytes that two ranks send in a step of two micro-batches that recomputes all blocks.

    Args:
        layout: A layout of two ranks.
        config: The model.
        weight: Bytes per element of gathered weights and of activations. Gradients have 4.
    """
    parameters, layers, tokens = config.parameters, config.layers, 256
    if layout.replicate == 2:
        return {"all_reduce": 2 * 4 * parameters}
    if layout.pipeline == 2:
        return {"send": 2 * 1024 * config.width * weight}
    if layout.tensor == 2:  # docs/reference/layouts.md
        stream, split = (
            tokens * config.width * weight,
            config.layers * config.per_block(lambda one: one.tensor_dim is not None),
        )
        whole = parameters - split - config.tables() * config.vocabulary * config.width
        gathers, loss = (6 * layers + 2) * stream, 3 * tokens * 4
        return {
            "all_gather": gathers,
            "reduce_scatter": (5 * layers + 2) * stream,
            "all_reduce": 2 * (loss + 4 * whole),
        }
    blocks = layers * config.per_block()
    gathered, reduced = {
        1: (parameters, parameters), 2: (parameters, 2 * parameters), 3: (2 * (parameters + blocks), 2 * parameters),
    }[layout.zero]  # fmt: skip
    keys = (layout.context - 1) * layers * 2 * config.kv_heads * config.head_dim * tokens * weight
    return {"all_gather": weight * gathered + 2 * keys, "reduce_scatter": 4 * reduced + keys}


@pytest.mark.parametrize("name", long_but(list(LAYOUTS), "zero3", "fsdp2 tp2", "uneven", "muon"))
def test_memory_and_collectives_of_a_step_equal_the_formulas(name: str) -> None:
    layout = LAYOUTS[name]
    recipe, config = recipe_of(layout, loss_chunk=128)
    if name == "muon":
        kind = recipe.train.optimizer.model_copy(update={"kind": "muon"})
        recipe, config = recipe_of(layout, loss_chunk=128, optimizer=kind)
    sent = Counter[str]()
    for part in pipeline_ranks(config, layout):
        held = simulate(recipe, config, part.pipeline_rank)
        planned = rank_memory(recipe.train, layout, config, part, BF16, recomputed_per_rank=config.layers, is_cuda=True)
        assert planned.total == pytest.approx(held.peak, rel=0.1), (planned, held)
        assert planned.weights == pytest.approx(held.weights, rel=0.01)
        assert planned.optimizer == pytest.approx(held.optimizer, rel=0.01)
        sent += held.sent
    everyone = {kind: number * layout.world // layout.pipeline for kind, number in sent.items()}
    if layout.world == 2:
        assert everyone == pytest.approx(sent_by_rings(layout, config, weight=2), rel=1e-3)


def real(layout: Parallel, text: str = TEXT) -> StepBytes:
    """Take a step on this process of a real group."""
    recipe, config = recipe_of(layout, text)
    mesh, task = join(layout, torch.device("cpu")), task_of(recipe.train, False, config, 0)
    built = parallelize.parallelize(
        recipe.train,
        meta_model(config),
        mesh,
        task,
        choose(recipe.train),
        config.layers,
        parallelize.initial_weights(config, 1),
    )
    return watch_step(recipe.train, layout, config, *built)


@pytest.mark.parametrize("zero", long_but([0, 1, 2, 3], 0, 3))
def test_memory_and_collectives_of_two_processes_equal_the_formulas_of_their_zero_stage(zero: int) -> None:
    """Bytes per parameter in fp32 (Rajbhandari et al. 2020, section 5, with sharded masters): 4 weight, 4 gradient, 8 moments."""
    layout = Parallel(shard=2, zero=zero) if zero else Parallel(replicate=2)  # type: ignore[arg-type]
    config = recipe_of(layout)[1]
    for held in run_on(2, real, layout):
        assert held.between == pytest.approx(
            16 * config.parameters if not zero else 12 * config.parameters / 2, rel=0.05
        )
        # A reduce-scatter in progress keeps the gradients of its block.
        assert held.after_backward == pytest.approx(16 * config.parameters / (2 if zero else 1), rel=0.15)
        assert {kind: 2 * number for kind, number in held.sent.items()} == sent_by_rings(layout, config, weight=4)


FP32 = ElementBytes(4)


@pytest.mark.parametrize(
    "layout", [Parallel(shard=2, expert=2), Parallel(shard=2, expert=2, zero=1), Parallel(tensor=2)]
)
def test_memory_of_two_processes_with_experts_equals_the_formula(layout: Parallel) -> None:
    recipe, config = recipe_of(layout, SPARSE)
    (part,) = pipeline_ranks(config, layout)
    planned = rank_memory(recipe.train, layout, config, part, FP32, recomputed_per_rank=config.layers, is_cuda=True)
    for held in run_on(2, real, layout, SPARSE):
        assert (held.weights, held.optimizer) == pytest.approx((planned.weights, planned.optimizer), rel=0.01)
        assert held.peak == pytest.approx(planned.total, rel=0.1)


class Storages(TorchDispatchMode):
    """Dispatch mode that remembers every storage of an operator, and which of them are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = operator(*arguments, **(options or {}))
        before = {id(x.untyped_storage()) for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in before:
                storage = tensor.untyped_storage()
                self.made[id(storage)] = (weakref.ref(storage), storage.nbytes())
        return found

    def held(self) -> int:
        return sum(nbytes for reference, nbytes in self.made.values() if reference() is not None)


CONFIG = ModelConfig(
    vocabulary=512, layers=4, width=256, heads=4, kv_heads=4, head_dim=64, mlp_width=640, sequence_length=128
)


def train(*overrides: str) -> Train:
    text = '[run]\nname="x"\n[tokens]\nsequence_length=128\n[model]\nlayers=4\nwidth=256\nheads=4\n[train]\nmicro_batch=2\nglobal_batch_tokens=256\n'
    return parse(text, "x", overrides).train


def held_after_forward(wanted: ModelConfig, mode: str, blocks: int, precision: str = "fp32") -> int:
    model = build_model(wanted, 0)
    recompute.apply_recompute(model, mode, blocks)
    arithmetic = precisions.PRECISIONS[precision]
    with Storages() as storages, precisions.autocast(arithmetic, torch.device("cpu")):
        hidden = model(torch.zeros(2, 128, dtype=torch.long))
        held = storages.held()
    assert hidden.requires_grad
    return held


@pytest.mark.parametrize(
    ("family", "precision"),
    [*((family, "bf16") for family in FAMILIES), ("gpt2", "fp32"), ("mixtral", "fp32"), ("qwen3", "fp8")],
)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_does_not_change_losses_and_gradients(
    recipe_file: Path, tmp_path: Path, family: str, precision: str, mode: str
) -> None:
    if FAMILIES[family].options.get("experts"):
        text = recipe_file.read_text().replace("mlp_width = 64\n", "")
        recipe_file = tmp_path / "experts.toml"
        recipe_file.write_text(text)
    shared = [f"train.precision={precision}", f"model.family={family}", "tokens.document_mask=true"]
    encoder = family in ENCODERS
    if family in ("gpt2", "bert"):
        shared.append("model.kv_heads=2")
    if encoder:
        shared.append("train.objective=masked")
    plain, again = (trainer_of(recipe_file, *shared, f"train.recompute={kind}") for kind in ("none", mode))
    data = plain.task.synthetic_batch(np.random.default_rng(0), 8, plain.model.config) if encoder else batch()
    data.inputs[:, 16] = 0
    calls: list[int] = []
    again.model.blocks[0].attention.register_forward_hook(lambda *a: calls.append(1))
    one, two = stats_of(plain, data), stats_of(again, data)
    assert len(calls) == 4, "two micro-batches, each computed twice"
    assert (one.loss, one.grad_norm, one.nats) == (two.loss, two.grad_norm, two.nats)
    for (name, p), q in zip(plain.model.named_parameters(), again.model.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2, "qk_norm": "none"}, {"norm_position": "output", "qk_norm": "full"}]
)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_memory_of_a_recomputed_block_equals_the_plan(changes: dict[str, Any], mode: str) -> None:
    """Counted from the storages alive after a forward pass, by the increase for one more block."""
    deep, shallow = (
        held_after_forward(CONFIG.with_changes(**changes, layers=layers), mode, layers) for layers in (4, 2)
    )
    measured = (deep - shallow) / 2 / (2 * 128) / 4  # elements per token and block
    assert measured == pytest.approx(checkpointed_elements_per_block(mode, CONFIG.with_changes(**changes)), rel=0.02)


@pytest.mark.parametrize("family", ["gpt2", "modernbert"])
def test_dropout_keeps_a_byte_per_element_and_no_scores(family: str) -> None:
    """Masks as in the plan; attention with dropped weights keeps no more than fused attention."""
    size = {"kv_heads": 4, "head_dim": 64, "window": 0, "global_every": 0}

    def held(layers: int, rates: Dropout) -> int:
        model = build_model(CONFIG.with_changes(**{**FAMILIES[family].options, **size, "layers": layers}), 0)
        masks = DropoutMasks.from_sequences(rates, torch.zeros(2, dtype=torch.int64), 128) if rates.is_on else None
        with Storages() as storages:
            hidden = model(torch.zeros(2, 128, dtype=torch.long), masks=masks)
            found = storages.held()
        assert hidden.requires_grad
        return found

    settings = [Dropout(), Dropout(hidden=0.1), Dropout(hidden=0.1, attention=0.1)]
    none, some, both = ((held(4, rates) - held(2, rates)) / 2 / (2 * 128) for rates in settings)
    planned = [mask_bytes(rates, CONFIG.with_changes(**{**FAMILIES[family].options, **size})) for rates in settings]
    assert some - none == pytest.approx(planned[1], rel=0.05)
    assert both - none <= 1.05 * planned[2]


def test_the_budget_recomputes_as_few_blocks_as_fit() -> None:
    device = choose(train())
    base = recompute.base_bytes(train("train.recompute=budget"), Parallel(), device)
    wanted, budget = CONFIG, train("train.recompute=budget")
    totals = [
        peak_memory(budget, Parallel(), wanted, FP32, before_model=base, recomputed_per_rank=blocks).total
        for blocks in range(5)
    ]
    between = (totals[1] + totals[2]) / 2
    asked = train("train.recompute=budget", f"train.memory_budget={between}")
    assert recompute.blocks_recomputed(asked, Parallel(), wanted, device) == 2
    recompute.check_budget(asked, Parallel(), wanted, device, base)
    assert recompute.blocks_recomputed(train("train.recompute=budget"), Parallel(), wanted, device) == 0, (
        "there is room here"
    )
    tight = train("train.recompute=budget", "train.memory_budget=1e6")
    assert recompute.blocks_recomputed(tight, Parallel(), wanted, device) == 4
    with pytest.raises(InputError, match=r"train\.memory_budget: .*1\.0 MB"):
        recompute.check_budget(tight, Parallel(), wanted, device, base)
    half = train("train.recompute=budget", "train.memory_budget=0.5")
    half_bytes, whole = (recompute.budget_bytes(one, Parallel(), device) for one in (half, train()))
    assert half_bytes == pytest.approx(0.5 * whole, rel=0.1)


@pytest.mark.parametrize(
    "changes", [{}, {"norm_position": "output", "qk_norm": "full"}, {"activation": "gelu", "gated": False}]
)
def test_recomputed_flops_equal_those_torch_counts(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of a backward pass with recompute, minus those without; attention is counted manually."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(product, "prefers_onednn", lambda: False)  # torch does not count oneDNN's products
    wanted = CONFIG.with_changes(**changes)

    def counted(mode: str, blocks: int) -> int:
        model = build_model(wanted, 0)
        recompute.apply_recompute(model, mode, blocks)
        loss = model(torch.zeros(1, 128, dtype=torch.long)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        products = counter.get_flop_counts()["Global"]
        return sum(flops for operator, flops in products.items() if "attention" not in str(operator))

    attention = 4 * wanted.heads * wanted.head_dim * (128 + 1) / 2
    for blocks in (1, 4):
        extra = (counted("full", blocks) - counted("none", 0)) / 128 + blocks * attention
        said = recomputed_flops_per_token("full", wanted, blocks)
        assert said == pytest.approx(extra, rel=1e-9)
    assert counted("selective", 4) == counted("none", 0)
    assert recomputed_flops_per_token("selective", wanted, 4) == 0


@pytest.mark.parametrize(
    ("precision", "mode", "tied"),
    [("fp32", "none", False), ("fp32", "selective", False), ("fp32", "full", False), ("fp32", "full", True),
     ("bf16", "full", False), ("bf16", "full", True)],
)  # fmt: skip
def test_the_peak_of_a_single_process_equals_the_plan(precision: str, mode: str, tied: bool) -> None:
    """Live bytes of a step of two micro-batches.

    Recompute keeps the gradient of the head, which waits for that of a tied embedding. bf16 also keeps the casts of the weights
    and the gradients that are added after a micro-batch.
    """
    settings = train(f"train.recompute={mode}", f"train.precision={precision}", "train.loss_chunk=32", "train.micro_batch=2",
                     "train.global_batch_tokens=512", "train.optimizer.learning_rate=0.01",
                     "train.optimizer.betas=[0.9, 0.95]")  # fmt: skip
    shape, device = CONFIG.with_changes(layers=3, vocabulary=2048, tie_embeddings=tied), choose(settings)
    blocks, task = (0 if mode == "none" else shape.layers), task_of(settings, False, shape, 0)
    built = parallelize.parallelize(settings, build_model(shape, 0), SINGLE_PROCESS, task, device, blocks)
    peak = watch_step(settings, Parallel(), shape, *built).peak
    planned = peak_memory(settings, Parallel(), shape, device.precision.element_bytes, recomputed_per_rank=blocks)
    # In bf16 the tensors that a norm widens count among the fitted gaps of the heap.
    assert planned.total - planned.fragmentation == pytest.approx(peak, rel=0.03 if precision == "fp32" else 0.06)
