"""A CPU step added up from its operations, on machines of which the answer is known without it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bessemer.layout.dial import resolve
from bessemer.layout.flops import flops_per_token
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.plan.estimate import cpu
from bessemer.plan.machine import PAIRS, TRANSPOSES, WHOLE, Host, Machine, Product, Timing, Way
from bessemer.recipe import Recipe, parse
from tests.plan.test_machine import machine, way

FREE = Host(0.0, 0.0, 0.0, 0.0)
RATE = 5e10


def flat(host: Host = FREE, passes: float = 1e30) -> Way:
    """A machine whose products and attention all run at one rate."""
    made = way(flops=RATE, per_second=passes, host=host)
    products = tuple(
        Product("fp32", name, m, n, k, Timing(2.0 * m * n * k / RATE))
        for name in TRANSPOSES
        for m, n, k in itertools.product((16, 4096), repeat=3)
    )
    return replace(made, products=products)


def of(**ways: Way) -> Machine:
    return machine(threads=len(ways), ways=ways)


def recipe(micro: int = 2, batch: int = 2048, more: str = "", model: str = "") -> Recipe:
    asked = parse(
        f"""
        run.name = "step"
        tokens.sequence_length = 256
        [model]
        layers = 3
        width = 128
        heads = 4
        kv_heads = 2
        mlp_width = 384
        {model}
        [train]
        steps = 10
        device = "cpu"
        micro_batch = {micro}
        global_batch_tokens = {batch}
        {more}
        """,
        "test",
    )
    return resolve(asked, 1000)


def config(asked: Recipe) -> ModelConfig:
    return model_config(asked, 1000)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_a_step_of_products_alone_takes_its_flops(micro: int) -> None:
    asked = recipe(micro)
    found = cpu.step(asked, config(asked), of(whole=flat()))
    assert found.seconds == pytest.approx(2048 * flops_per_token(config(asked)) / RATE, rel=1e-6)
    assert found.low < found.seconds < found.high


def test_two_at_a_time_halves_the_turns() -> None:
    asked = recipe(2)  # four micro-batches
    alone = cpu.step(asked, config(asked), of(whole=flat()))
    both = cpu.step(asked, config(asked), of(whole=flat(), pairs=flat()))
    assert both.seconds == pytest.approx(alone.seconds / 2)
    one = recipe(8)  # nothing to take together
    assert cpu.step(one, config(one), of(whole=flat(), pairs=flat())).seconds == pytest.approx(alone.seconds)


def test_the_host_is_counted_by_block_micro_batch_and_update() -> None:
    asked = recipe(2)
    free = cpu.step(asked, config(asked), of(whole=flat()))
    found = cpu.step(asked, config(asked), of(whole=flat(Host(1e-3, 2e-3, 3e-3, 4e-3))))
    assert found.seconds - free.seconds == pytest.approx(4 * (3 * 1e-3 + 2e-3) + 3 * 3e-3 + 4e-3)


def test_a_block_recomputed_in_full_takes_its_forward_again() -> None:
    plain, again = recipe(2), recipe(2, more='recompute = "full"')
    shape = config(plain)
    more = cpu.step(again, shape, of(whole=flat())).seconds - cpu.step(plain, shape, of(whole=flat())).seconds
    forward = 2.0 * (shape.block_matrix_parameters - shape.width * shape.mlp_width)
    attention = 2 * (256 + 1) * shape.head_dim * shape.heads
    assert more == pytest.approx(2048 * 3 * (forward + attention) / RATE, rel=1e-6)


def test_passes_are_of_every_element_that_a_step_moves() -> None:
    """Of a machine where only passes take time: more with more tokens, none with none, and the update's whatever the batch."""
    few, many = recipe(2, batch=1024), recipe(2, batch=2048)
    made = of(whole=flat(passes=1e9))
    shape = config(few)
    work = [cpu.step(asked, shape, made).parts["passes"] for asked in (few, many)]
    table_and_sums = 1.0 + shape.parameters / 1e9  # what does not grow with the tokens is once or by micro-batch
    assert 1.9 < work[1] / work[0] < 2.0 + table_and_sums
    assert cpu.step(few, shape, made).parts["update"] == pytest.approx(2 * shape.parameters / 1e9)


def test_a_gpt2_has_its_own_norms_and_no_rotation() -> None:
    asked = recipe(2, model='family = "gpt2"')
    slow = way(flops=RATE, per_second=1e9, host=FREE)
    without = tuple(entry for entry in slow.passes if entry.name not in ("rotate", "norm", "head_norm", "swiglu"))
    found = cpu.step(asked, config(asked), of(whole=replace(slow, passes=without)))
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("more", "model", "said"),
    [
        ("[train.optimizer]\nkind = 'muon'", "", "AdamW"),
        ("compile = 'on'", "", "compiled"),
        ("", "window = 64", "windows"),
        ("precision = 'bf16'", "", "bf16"),
        ("[tokens_]", "", ""),
    ],
)
def test_what_cannot_be_predicted_is_said(more: str, model: str, said: str) -> None:
    if not said:
        asked = recipe()
        assert cpu.why_not(asked, config(asked)) is None
        masked = asked.model_copy(update={"tokens": asked.tokens.model_copy(update={"document_mask": True})})
        assert "documents" in (cpu.why_not(masked, config(masked)) or "")
        return
    asked = recipe(more=more, model=model)
    assert said in (cpu.why_not(asked, config(asked)) or "")


def test_the_interval_knows_the_spread() -> None:
    asked = recipe()
    made = machine()
    wide = replace(
        made.ways[WHOLE],
        products=tuple(replace(entry, timing=replace(entry.timing, spread=0.8)) for entry in made.ways[WHOLE].products),
    )
    narrow, broad = (
        cpu.step(asked, config(asked), one) for one in (made, replace(made, ways={WHOLE: wide}, _rates={}))
    )
    assert broad.seconds == pytest.approx(narrow.seconds)
    assert broad.high - broad.low > 1.5 * (narrow.high - narrow.low)
    assert PAIRS not in made.ways
