"""A folder of text is enough for a run: everything else is derived from it, recorded, and kept."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.model import recipe_defaults
from bessemer.recipe import Recipe, ResolvedRecipe, as_resolved, dump, load, parse
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train import measure
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer
from bessemer.workflow import derive, sizing
from bessemer.workflow.reuse import require_unchanged
from bessemer.workflow.sizing import Basis
from tests.conftest import write_text

FIVE = '[run]\nname = "five"\n[[corpus.sources]]\nname = "mine"\npaths = ["text"]\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text", 20)
    (tmp_path / "five.toml").write_text(FIVE)
    return tmp_path


def stages(run: Path) -> dict[str, bool]:
    return {row["name"]: row["skipped"] for row in read_json(run / "stages.json")["stages"]}


def test_corpus_and_tokens_need_no_model(here: Path) -> None:
    for command in ("corpus", "tokens"):
        assert run_command([command, "five.toml"]) == 0
    run = RunDirectory(here / "runs" / "five")
    found = read_json(run.basis)
    store = TokenStore.open(run.tokens)
    chosen = derive.filled(load("five.toml"), run)
    assert (
        store.vocabulary == chosen.tokenizer.vocabulary
        and store.num_tokens("train") > 16 * chosen.tokens.sequence_length
    )
    assert run_command(["tokens", "five.toml"]) == 0
    assert stages(run.path)["tokens"] and read_json(run.basis) == found
    # Another machine does not invalidate the tokens; another given value does.
    assert run_command(["tokens", "five.toml", "--set", "tokenizer.vocabulary=300"]) == 0
    assert TokenStore.open(run.tokens).vocabulary == 300


@pytest.mark.parametrize("command", ["run", "tokens", "check"])
def test_a_recipe_without_text_is_one_error(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.toml").write_text(f'[run]\nname = "x"\ndir = "{tmp_path}"\n')
    assert run_command([command, str(tmp_path / "empty.toml")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_derived_vocabulary_that_the_text_does_not_support_is_reduced(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "MIN_VOCABULARY", 50_000)
    command = ["tokens", "five.toml", "--set", "model.depth=2"]
    assert run_command(["corpus", "five.toml"]) == 0
    assert run_command([*command, "--set", "tokenizer.vocabulary=50000"]) == 2
    refused = capsys.readouterr().err
    assert run_command(command) == 0
    run = RunDirectory(here / "runs" / "five")
    ids, found = TokenStore.open(run.tokens).vocabulary, read_json(run.basis)
    assert 257 < ids < 50_000 and f"supports only {ids} ids" in " ".join(refused.split())
    assert found["basis"]["ids"] == ids
    assert run_command(command) == 0
    assert stages(run.path)["tokens"] and read_json(run.basis) == found
    # With more text, more tokens are derived again.
    write_text(here / "text" / "more", 60)
    assert run_command(["corpus", "five.toml"]) == run_command(command) == 0
    assert TokenStore.open(run.tokens).vocabulary > ids


def test_the_machine_is_timed_only_if_a_size_depends_on_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(derive, "_machine", lambda *_: pytest.fail("timed for nothing"))
        assert run_command(["corpus", "five.toml"]) == 0
        for given in ("model.depth=2", "train.steps=3"):
            assert run_command(["tokens", "five.toml", "--set", given]) == 0
            found = read_json(here / "runs" / "five" / "basis.json")
            assert found["basis"]["device"] == "" and found["basis"]["text_bytes"] > 0
    assert run_command(["tokens", "five.toml"]) == 0
    found = read_json(here / "runs" / "five" / "basis.json")
    assert found["basis"]["device"] and found["basis"]["flops_per_second"] > 0


def test_a_first_step_that_compiles_does_not_count_in_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compile in the first step, and the next two are slow as well."""
    clock, seconds = [0.0], iter([100.0, 5.0, 5.0])
    compute = Trainer.forward_backward

    def timed(trainer: Trainer, *given: Any, **named: Any) -> Any:
        clock[0] += next(seconds, 1.0)
        return compute(trainer, *given, **named)

    monkeypatch.setattr(measure, "WARMUP_STEPS", 3)
    monkeypatch.setattr(measure, "TIMED_STEPS", 20)
    monkeypatch.setattr(Trainer, "forward_backward", timed)
    monkeypatch.setattr(measure, "perf_counter", lambda: clock[0])
    recipe = recipe_defaults.resolve(Recipe.model_validate(derive.PROBE), derive.PROBE_VOCABULARY)
    config = config_of(recipe, derive.PROBE_VOCABULARY, 0)
    first, second = (measure.step_seconds(recipe, config, devices.choose(recipe.train), 20.0) for _ in range(2))
    assert first == pytest.approx(second)


def test_a_folder_of_text_is_trained_on_and_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "text", "--set", "train.steps=4", "--set", "evaluate.sample_tokens=4"]
    assert run_command(command) == 0
    shown = capsys.readouterr().err
    assert 'name = "text"' in shown and "derived from" in shown and "model.depth = 2" in shown
    run = RunDirectory(here / "runs" / "text")
    text = run.recipe.read_text()
    assert text.startswith("# derived from ") and "# tokenizer.vocabulary = " in text
    stored = load(run.recipe)
    assert stored.train.steps == 4 and stored.model.layers == 2
    assert run_command(command) == 0
    assert all(stages(run.path)[name] for name in ("corpus", "tokens", "plan", "train", "evaluate", "export"))
    assert run.recipe.read_text() == text
    assert run_command(["run", str(run.path)]) == 0  # the run directory itself
    assert run_command(["evaluate", str(run.path)]) == 0


def test_an_extended_run_keeps_its_derived_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "text", "--set", "evaluate.sample_tokens=4", "--set", "export.hf=false", "--set"]
    assert run_command([*command, "train.minutes=0.02"]) == 0
    run = RunDirectory(here / "runs" / "text")
    before, found = load(run.recipe), read_json(run.basis)
    assert run_command([*command, "train.minutes=0.08"]) == 0
    after, planned = load(run.recipe), read_json(run.plan)
    capsys.readouterr()
    assert run_command(command[:-1]) == 0  # without a time, the run keeps its own
    assert f"{after.train.steps} steps are done, train.minutes = 0.08" in capsys.readouterr().err
    assert (
        load(run.recipe) == after
        and read_json(run.plan)["memory_bytes"] == planned["memory_bytes"]
        and stages(run.path)["plan"]
    )
    assert (after.train.steps or 0) > (before.train.steps or 0) and read_json(run.basis) == found
    assert after.train.optimizer == before.train.optimizer and after.model == before.model


@pytest.mark.parametrize("schedule", ["wsd", "linear"])
def test_another_limit_on_epochs_extends_the_run_or_is_refused(here: Path, schedule: str) -> None:
    limit = "train.max_epochs="
    command = ["run", "text", "--set", "model.depth=1", "--set", "tokens.sequence_length=128"]
    command += ["--set", f"train.schedule.kind={schedule}", "--set", "export.hf=false", "--set"]
    run = RunDirectory(here / "runs" / "text")
    assert run_command([*command, f"{limit}0.02"]) == 0
    steps = load(run.recipe).train.steps or 0
    assert run_command([*command, f"{limit}0.04"]) == (0 if schedule == "wsd" else 2)
    assert load(run.recipe).train.steps == pytest.approx(2 * steps if schedule == "wsd" else steps, abs=1)


def test_a_restarted_run_keeps_its_derived_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Corpus and tokens are kept, and so are the values they were made with."""
    command = ["train", "text", "--set", "model.depth=1", "--set", "train.steps=2", "--set", "evaluate.sample_tokens=4"]
    assert [run_command([stage, *command[1:]]) for stage in ("corpus", "tokens", "train")] == [0, 0, 0]
    run = RunDirectory(here / "runs" / "text")
    derive, trained = read_json(run.basis), load(run.recipe)
    capsys.readouterr()
    assert run_command([*command, "--restart"]) == 0, capsys.readouterr().err
    assert read_json(run.basis) == derive and load(run.recipe) == trained
    require_unchanged(load("text", ["model.depth=1", "train.steps=2"]), run)  # derived values do not change the tokens


def test_a_derived_length_fits_the_model_to_start_from(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=24, **sizes)
    theirs.save_pretrained(here / "theirs")
    recipe = parse(FIVE + '[model]\nfrom = "hf:theirs"\n', "five")
    filled = derive.filled(recipe, RunDirectory(here / "runs" / "five"))
    assert filled.tokens.sequence_length <= 24


def test_passages_of_a_single_file_are_held_out(here: Path) -> None:
    parts = [path.read_text() for path in sorted((here / "text" / "prose").iterdir())]
    (here / "book.txt").write_text("\n".join(parts))
    for command in ("corpus", "tokens"):
        assert run_command([command, "book.txt"]) == 0
    store = TokenStore.open(here / "runs" / "book" / "tokens")
    assert store.manifest["sources"]["text"]["heldout"]["documents"] == 1
    held, trained = (store.manifest["sources"]["text"][split]["bytes"] for split in ("heldout", "train"))
    assert held + trained == len("\n".join(parts).encode().strip()) and 0.05 < held / trained < 0.2


def test_run_directories_are_not_read_as_text(here: Path) -> None:
    assert load(".").corpus.sources[0].exclude == ("runs",)
    assert load("text").corpus.sources[0].exclude == ()


def test_plan_shows_the_model_and_tokens_of_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "text"]) == 0
    shown = capsys.readouterr()
    assert "2 layers, width 128" in shown.out and "40 files, before cleaning" in shown.err
    assert run_command(["plan", "text", "--set", "train.minutes=1000", "--set", "train.max_epochs=2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["tokens"] < 2 * 14_500, "the epochs of raw files count before they are tokens"
    assert not (here / "runs").exists()


def test_too_little_text_is_one_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "note.txt").write_text(
        "\n".join(f"Line {number} of a short note on steel and iron." for number in range(20))
    )
    assert run_command(["run", "note.txt"]) == 2
    assert "corpus.sources" in capsys.readouterr().err


CPU, GPU = 3e10, 1e14
SIZES = (50_000, 2_000_000, 100_000_000, 1_000_000_000)


def basis(text_bytes: int, flops: float = CPU, documents: int = 5000) -> Basis:
    return Basis(text_bytes, documents, "here", flops, 0.02, 100, sizing.held_out_bytes(text_bytes))


def derived(text_bytes: int, *overrides: str, flops: float = CPU) -> Recipe:
    return sizing.derive(parse(FIVE, "five", overrides), basis(text_bytes, flops))[0]


@pytest.mark.parametrize("flops", [CPU, GPU])
def test_everything_grows_with_the_text(flops: float) -> None:
    made = [derived(size, flops=flops) for size in SIZES]
    for small, large in itertools.pairwise(made):
        assert small.tokenizer.vocabulary <= large.tokenizer.vocabulary
        assert small.model.depth <= large.model.depth
        assert small.train.minutes < large.train.minutes
        assert small.train.optimizer.weight_decay >= large.train.optimizer.weight_decay
    assert [one.train.optimizer.kind for one in (made[0], made[-1])] == ["muon", "muon"]
    assert made[0].train.optimizer.weight_decay > 0.5 and made[0].tokenizer.vocabulary < 512


def test_a_faster_machine_trains_a_larger_model_in_the_same_time() -> None:
    slow, fast = derived(10**9), derived(10**9, flops=GPU)
    assert fast.model.depth > slow.model.depth and fast.tokenizer.vocabulary > slow.tokenizer.vocabulary
    assert fast.tokens.sequence_length > slow.tokens.sequence_length
    assert fast.train.minutes == slow.train.minutes


@pytest.mark.parametrize("size", SIZES)
def test_derived_values_resolve_and_nothing_is_derived_twice(size: int) -> None:
    made, choices = sizing.derive(parse(FIVE, "five"), basis(size))
    assert {f"{one.table}.{key}" for one in choices for key in one.values} >= {
        "tokens.held_out", "train.minutes", "model.depth", "tokenizer.vocabulary", "tokens.sequence_length",
        "train.global_batch_tokens",
    }  # fmt: skip
    resolved = recipe_defaults.resolve(made, made.tokenizer.vocabulary or 0, 1000)
    assert as_resolved(parse(dump(resolved, ["why"]), "stored"), ResolvedRecipe) == resolved
    assert sizing.derive(resolved, basis(size))[0] == resolved


@pytest.mark.parametrize(
    "given",
    [
        "tokenizer.vocabulary=5000", "tokens.held_out=0.3", "tokens.sequence_length=64", "model.depth=4", "train.minutes=3.0",
        "train.steps=100", "train.tokens=100000", "train.global_batch_tokens=4096", "train.optimizer.weight_decay=0.0",
        "train.schedule.kind=cosine",
    ],
)  # fmt: skip
def test_given_values_are_kept_and_the_others_are_derived(given: str) -> None:
    asked = parse(FIVE, "five", [given])
    made = sizing.derive(asked, basis(2_000_000))[0]
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
    assert derived(2_000_000, "model.depth=4").train.minutes is None  # the length derived from depth, up to max_epochs
    assert derived(2_000_000, "model.depth=4").train.max_epochs == sizing.MAX_EPOCHS
    assert derived(2_000_000, "train.minutes=3").train.max_epochs is None  # given minutes are used completely


def test_the_optimizer_and_schedule_are_completed_unless_they_are_of_another_kind() -> None:
    given = ("train.optimizer.learning_rate=0.02", "train.schedule.warmup_steps=7")
    train = derived(2_000_000, *given).train
    assert (train.optimizer.kind, train.optimizer.embedding_rate, train.optimizer.learning_rate) == ("muon", 8.0, 0.02)
    assert (train.schedule.kind, train.schedule.decay_share, train.schedule.warmup_steps) == ("wsd", 0.5, 7)
    assert derived(2_000_000, "train.optimizer.kind=muon").train.optimizer == derived(2_000_000).train.optimizer
    other = derived(2_000_000, "train.optimizer.kind=adamw", "train.schedule.kind=linear").train
    assert (other.optimizer.embedding_rate, other.schedule.decay_share) == (1.0, 0.2)


def test_few_documents_hold_out_passages_except_of_labelled_ones() -> None:
    few = Basis(2_000_000, 1, "here", CPU, 1.0, 1, 2_000_000)
    assert sizing.derive(parse(FIVE, "five"), few)[0].tokens.held_out_from == "passages"
    labelled = FIVE + 'label = "a"\n[train]\nobjective = "classify"\n'
    assert sizing.derive(parse(labelled, "five"), few)[0].tokens.held_out_from == "documents"


def test_max_epochs_can_end_a_run_before_its_minutes() -> None:
    made = derived(50_000)
    capped = recipe_defaults.resolve(made, 320, 10_000, unique_tokens=30_000)
    assert capped.train.steps == -(-int(sizing.MAX_EPOCHS * 30_000) // made.train.global_batch_tokens)
    assert recipe_defaults.resolve(made, 320, 10, unique_tokens=30_000).train.steps == 10
    assert recipe_defaults.resolve(derived(50_000, "train.steps=7"), 320, unique_tokens=30).train.steps == 7
