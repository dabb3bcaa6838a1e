"""What follows from a corpus and a machine: the table of workflow/sizing.py, and that what a recipe gives stays."""

import itertools

import pytest

from bessemer.model import recipe_defaults
from bessemer.recipe import Recipe, ResolvedRecipe, as_resolved, dump, parse
from bessemer.workflow import sizing
from bessemer.workflow.sizing import Basis, derive

FIVE = '[run]\nname = "x"\n[[corpus.sources]]\nname = "mine"\npaths = ["text"]\n'
CPU, GPU = 3e10, 1e14
SIZES = (50_000, 2_000_000, 100_000_000, 1_000_000_000)


def basis(text_bytes: int, flops: float = CPU, documents: int = 5000) -> Basis:
    return Basis(text_bytes, documents, "here", flops, 0.02, 100, sizing.held_out_bytes(text_bytes))


def derived(text_bytes: int, *overrides: str, flops: float = CPU) -> Recipe:
    return derive(parse(FIVE, "five", overrides), basis(text_bytes, flops))[0]


@pytest.mark.parametrize("flops", [CPU, GPU])
def test_everything_grows_with_the_text(flops: float) -> None:
    made = [derived(size, flops=flops) for size in SIZES]
    for small, large in itertools.pairwise(made):
        assert small.tokenizer.vocabulary <= large.tokenizer.vocabulary
        assert small.model.depth <= large.model.depth
        assert small.train.minutes < large.train.minutes
        assert small.train.optimizer.weight_decay >= large.train.optimizer.weight_decay
    assert made[0].train.optimizer.weight_decay > 0.5 and made[0].tokenizer.vocabulary < 512


def test_a_faster_machine_trains_a_larger_model_with_the_same_time() -> None:
    slow, fast = derived(10**9), derived(10**9, flops=GPU)
    assert fast.model.depth > slow.model.depth and fast.tokenizer.vocabulary > slow.tokenizer.vocabulary
    assert fast.tokens.sequence_length > slow.tokens.sequence_length
    assert fast.train.minutes == slow.train.minutes


@pytest.mark.parametrize("size", SIZES)
def test_the_dial_takes_what_was_derived_and_nothing_is_derived_twice(size: int) -> None:
    made, choices = derive(parse(FIVE, "five"), basis(size))
    assert {f"{one.table}.{key}" for one in choices for key in one.values} >= {
        "tokens.held_out", "train.minutes", "model.depth", "tokenizer.vocabulary", "tokens.sequence_length",
        "train.global_batch_tokens",
    }  # fmt: skip
    resolved = recipe_defaults.resolve(made, made.tokenizer.vocabulary or 0, 1000)
    assert as_resolved(parse(dump(resolved, ["why"]), "stored"), ResolvedRecipe) == resolved
    assert derive(resolved, basis(size))[0] == resolved


@pytest.mark.parametrize(
    "given",
    [
        "tokenizer.vocabulary=5000", "tokens.held_out=0.3", "tokens.sequence_length=64", "model.depth=4", "train.minutes=3.0",
        "train.steps=100", "train.tokens=100000", "train.global_batch_tokens=4096", "train.optimizer.weight_decay=0.0",
        "train.schedule.kind=cosine",
    ],
)  # fmt: skip
def test_what_is_given_stays_and_the_rest_follows(given: str) -> None:
    asked = parse(FIVE, "five", [given])
    made = derive(asked, basis(2_000_000))[0]
    table, _, key = given.partition("=")[0].rpartition(".")
    for recipe in (asked, made):
        section = recipe
        for name in table.split("."):
            section = getattr(section, name)
        assert str(getattr(section, key)) == given.partition("=")[2]
    assert recipe_defaults.resolve(made, made.tokenizer.vocabulary or 0, 100).train.steps


def test_a_given_size_or_time_changes_what_depends_on_it() -> None:
    assert derived(2_000_000, "train.minutes=100").model.depth > derived(2_000_000).model.depth
    assert derived(10**9, "model.depth=12").tokenizer.vocabulary > derived(10**9).tokenizer.vocabulary
    assert derived(2_000_000, "model.depth=4").train.minutes is None  # the dial's horizon, up to max_epochs
    assert derived(2_000_000, "model.depth=4").train.max_epochs == sizing.MAX_EPOCHS
    assert derived(2_000_000, "train.minutes=3").train.max_epochs is None  # given minutes are used to the end


def test_a_text_of_few_documents_holds_out_passages_but_never_of_a_labelled_one() -> None:
    few = Basis(2_000_000, 1, "here", CPU, 1.0, 1, 2_000_000)
    assert derive(parse(FIVE, "five"), few)[0].tokens.held_out_from == "passages"
    labelled = FIVE + 'label = "a"\n[train]\nobjective = "classify"\n'
    assert derive(parse(labelled, "five"), few)[0].tokens.held_out_from == "documents"


def test_epochs_end_a_run_before_its_minutes() -> None:
    made = derived(50_000)
    capped = recipe_defaults.resolve(made, 320, 10_000, unique_tokens=30_000)
    assert capped.train.steps == -(-int(sizing.MAX_EPOCHS * 30_000) // made.train.global_batch_tokens)
    assert recipe_defaults.resolve(made, 320, 10, unique_tokens=30_000).train.steps == 10
    assert recipe_defaults.resolve(derived(50_000, "train.steps=7"), 320, unique_tokens=30).train.steps == 7
