"""The batch of each step, compared with manual values and with itself."""

from fractions import Fraction

import pytest

from bessemer.common.errors import InputError
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Batches, parse

TEXT = """
[run]
name = "x"
[tokens]
sequence_length = 32
[model]
layers = 2
width = 32
heads = 2
[train]
steps = 40
global_batch_tokens = 640
micro_batch = 2
"""


def batches(*overrides: str) -> Batches:
    return resolve(parse(TEXT, "x", overrides), 400).batches


def test_a_ramp_over_steps_equals_manual_values() -> None:
    """The ramp is a line from 4 to 20 sequences over 6 steps, rounded down to a multiple of 2."""
    found = batches("train.batch_ramp.start_tokens=128", "train.batch_ramp.steps=6")
    line = [4 + Fraction(16 * step, 6) for step in range(7)]
    assert [found.sequences(step) for step in range(9)] == [4, 6, 8, 12, 14, 16, 20, 20, 20]
    assert all(0 <= exact - found.sequences(step) < 2 for step, exact in enumerate(line))


@pytest.mark.parametrize("length", ["steps=7", "tokens=3000", "steps=1"])
def test_before_and_step_of_agree_with_batch_sizes(length: str) -> None:
    found = batches("train.batch_ramp.start_tokens=64", f"train.batch_ramp.{length}")
    owner = [step for step in range(30) for _ in range(found.sequences(step))]
    assert [found.step_of(sample) for sample in range(len(owner))] == owner
    assert [found.before(step) for step in range(30)] == [owner.index(step) for step in range(30)]
    for samples in (1, 5, 64, 65, 200):
        steps = found.steps_for(samples)
        assert found.before(steps - 1) < samples <= found.before(steps)


def test_a_horizon_in_tokens_counts_the_ramp() -> None:
    ramp = ("train.batch_ramp.start_tokens=128", "train.batch_ramp.steps=6", "train.steps=1000")
    text = TEXT.replace("steps = 40", "tokens = 6400")
    plain, ramped = (resolve(parse(text, "x", more), 400) for more in ((), ramp[:2]))
    assert plain.train.steps == 10
    sizes = [4, 6, 8, 12, 14, 16] + [20] * 100
    assert ramped.train.steps == next(n for n in range(100) if sum(sizes[:n]) * 32 >= 6400)


def test_a_derived_micro_batch_divides_every_batch() -> None:
    text = TEXT.replace("micro_batch = 2\n", "")
    made = resolve(parse(text, "x", ["train.batch_ramp.start_tokens=192", "train.batch_ramp.steps=9"]), 400)
    assert made.train.micro_batch == 2  # the greatest common divisor of 6 and 20
    assert all(made.batches.sequences(step) % 2 == 0 for step in range(20))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["train.batch_ramp.start_tokens=100", "train.batch_ramp.steps=3"], "start_tokens"),
        (["train.batch_ramp.start_tokens=1280", "train.batch_ramp.steps=3"], "up to train.global_batch_tokens"),
        (["train.batch_ramp.start_tokens=96", "train.batch_ramp.steps=3"], "does not divide the 3 sequences"),
        (["train.batch_ramp.start_tokens=128"], "steps and tokens"),
        (["train.batch_ramp.start_tokens=128", "train.batch_ramp.steps=3", "train.batch_ramp.tokens=3"], "steps and tokens"),
        (["train.optimizer.base_width=64", "model.tie_embeddings=true"], "needs model.tie_embeddings = false"),
        (["train.optimizer.betas=[0.9, 1.0]"], "train.optimizer.betas: input should be less than 1"),
    ],
)  # fmt: skip
def test_contradictory_batches_are_errors(overrides: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse(TEXT, "x", overrides)


def test_a_ramp_above_a_derived_batch_is_an_error() -> None:
    text = TEXT.replace("global_batch_tokens = 640\n", "").replace("micro_batch = 2\n", "")
    with pytest.raises(InputError, match="train.batch_ramp.start_tokens"):
        resolve(parse(text, "x", ["train.batch_ramp.start_tokens=3200000", "train.batch_ramp.steps=3"]), 400)


def test_betas_of_lion_are_those_of_its_paper() -> None:
    assert resolve(parse(TEXT, "x"), 400).train.optimizer.betas == (0.9, 0.95)
    assert resolve(parse(TEXT, "x", ["train.optimizer.kind=lion"]), 400).train.optimizer.betas == (0.9, 0.99)
    given = parse(TEXT, "x", ["train.optimizer.kind=lion", "train.optimizer.betas=[0.8, 0.9]"])
    assert resolve(given, 400).train.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("offset", [0, 7, -3])
@pytest.mark.parametrize(
    "omitted",
    [
        [], [(40, 60)], [(0, 13)], [(100, 171), (30, 35)], [(50, 90), (80, 130), (140, 140)],
        [(60, 61), (62, 63), (200, 260), (261, 300)],
    ],
)  # fmt: skip
def test_no_step_reads_omitted_samples(ramp: bool, offset: int, omitted: list[tuple[int, int]]) -> None:
    """The rule step by step: a batch that would contain an omitted sample starts after the range."""
    plain = batches(*(["train.batch_ramp.start_tokens=128", "train.batch_ramp.steps=6"] if ramp else []))
    found = plain.without(omitted).with_position(0, 0).with_position(1, plain.without(omitted).after(1) + offset)
    place, readers, passed = offset, dict[int, int](), []
    for step in range(40):
        size, before = plain.sequences(step), place
        for first, end in sorted(omitted):
            if first < end and place < end and place + size > first:
                place = end
        if place > before:
            passed.append((before, place))
        assert found.first(step) == place and found.sequences(step) == size, (step, omitted)
        readers |= dict.fromkeys(range(place, place + size), step)
        place += size
        assert found.after(step + 1) == place
        assert found.gaps(step + 1) == passed
    assert {sample: found.reader_of(sample) for sample in range(offset, place)} == {
        sample: readers.get(sample) for sample in range(offset, place)
    }
