"""`bessemer check`: every row holds for a sound recipe, and fails for the fault that it is there for."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.check import begun, learning, masks, planned, trial
from bessemer.check import machine as machines
from bessemer.check.rows import CheckRow, collected, is_go, table, verdict
from bessemer.check.trial import TrialResult
from bessemer.checkpoint.retention import Retention
from bessemer.cli import run_command
from bessemer.defaults import derived_keys
from bessemer.errors import BessemerError
from bessemer.guard.policy import GuardState
from bessemer.model import attention
from bessemer.model.attention import AttentionSpec, Documents
from bessemer.recipe import Parallel, Recipe, load
from bessemer.run import RunFolder, read_json, write_json
from bessemer.tokens.loader import Batch, Loader
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.measure import RunTiming
from bessemer.train.trainer import Trainer

PACKED = "tokens.document_mask=true"


def rows_of(found: str) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in json.loads(found)["rows"]}


def check(recipe_file: Path, runs: Path, *overrides: str, resume: bool = False, expected: int = 0) -> Any:
    sets = [part for value in (f"run.dir={runs}", *overrides) for part in ("--set", value)]
    code = run_command(["check", str(recipe_file), *sets, "--json", *(["--resume"] if resume else [])])
    assert code == expected


def test_a_sound_recipe_is_go_and_its_run_folder_is_untouched(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    check(recipe_file, runs, PACKED)
    rows = rows_of(capsys.readouterr().out)
    bad = {name: row for name, row in rows.items() if row["status"] == "FAIL"}
    assert not bad
    assert "24 losses, samples and weights" in rows["a new process continues bit for bit"]["evidence"]
    held = ("falls below a uniform guess", "overfits a single sequence", "targets are shifted by one", "file system",
            "the loss is -log p(next token)", "no token sees the future", "no token sees another document",
            "holds all that a resume needs", "validation and throughput apart", "matmul has the known answer",
            "hashes of the token shards", "space for the whole run")  # fmt: skip
    assert {name: rows[name]["status"] for name in held} == dict.fromkeys(held, "ok")
    assert rows["evaluation sets are removed"]["status"] == "warn"
    assert rows["clocks agree"]["status"] == "not here"
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before
    assert not list(runs.glob(".bessemer-check-*"))


def test_what_run_refuses_of_a_run_that_has_begun_is_refused(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bessemer.train.measure.time_run", lambda *arguments: RunTiming(0.01, 0.0, 0.0, 2))
    assert run_command(["train", str(recipe_file), "--set", f"run.dir={runs}"]) == 0
    for override, says in (
        ("train.z_loss=0.1", "holds a run of another recipe ("),
        ("train.steps=20", "24 of them are done"),
    ):
        sentences = []
        for command in ("check", "train"):
            capsys.readouterr()
            sets = ["--set", f"run.dir={runs}", "--set", override]
            assert run_command([command, str(recipe_file), *sets]) == 2
            sentences.append(
                next(line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: "))
            )
        assert says in sentences[0] and sentences[0] == sentences[1]


def test_a_damaged_shard_is_no_go(runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = runs / "small" / "tokens" / "prose-train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    check(recipe_file, runs, expected=1)
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["rows"] if row["name"] == "hashes of the token shards")
    assert row["status"] == "FAIL"
    assert "prose-train-00000.bin" in row["evidence"]
    assert found["verdict"].startswith("no-go")
    learns = next(row for row in found["rows"] if row["name"] == "falls below a uniform guess")
    assert (learns["status"], learns["evidence"]) == ("not here", "not tried: another row fails already")
    assert any(row["name"] == "no token sees the future" for row in found["rows"])


@pytest.mark.parametrize(
    ("folder", "overrides", "complaint"),
    [
        ("no/such.toml", (), "no/such.toml"),
        ("small", ("run.dir=/proc/x",), "/proc: cannot be written (No such file or directory); choose another folder"),
        (
            "small",
            ("guard.roll_back=false", "guard.skip_batches=3"),
            "skip_batches has no effect with roll_back = false",
        ),
        ("small", ("checkpoint.mirror=/proc/nope",), "checkpoint.mirror: /proc/nope/small: /proc cannot be written"),
        ("runs/empty", (), "runs/empty: no file there"),
        ("runs/damaged", (), "runs/damaged/recipe.toml"),
    ],
)
def test_wrong_input_is_one_sentence(
    folder: str, overrides: tuple[str, ...], complaint: str, runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    (runs / "empty" / "corpus").mkdir(parents=True)
    (runs / "damaged").mkdir()
    (runs / "damaged" / "recipe.toml").write_text("[run\nname = ")
    place = str(recipe_file) if folder == "small" else str(runs.parent / folder)
    sets = [part for value in overrides for part in ("--set", value)]
    assert run_command(["check", place, *sets]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\nbessemer:") + said.startswith("bessemer:") == 1
    assert "Traceback" not in said


@pytest.fixture
def small(runs: Path, recipe_file: Path) -> tuple[Recipe, TokenStore]:
    store = TokenStore.open(runs / "small" / "tokens")
    return derived_keys.resolve(load(recipe_file, [PACKED]), store.vocabulary), store


def trainer_of(recipe: Recipe, store: TokenStore) -> Trainer:
    from bessemer.model.transformer import build_model
    from bessemer.train.task import config_of

    config = config_of(recipe, store.vocabulary, 0)
    return Trainer(recipe, build_model(config, 1), devices.choose(recipe.train), store.end_of_text, len(store.sources))


def failed(recipe: Recipe, store: TokenStore, trainer: Trainer, reader: Any = None) -> set[str]:
    reader = reader or trainer.task.loader(recipe, store)
    return {row.name for row in masks.mask_rows(recipe, trainer, reader, store) if row.status == "FAIL"}


def test_targets_that_are_not_the_next_token_fail(
    small: tuple[Recipe, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = small
    assert failed(recipe, store, trainer_of(recipe, store)) == set()
    honest = Loader.batch

    def shifted(self: Loader, first: int, count: int) -> Batch:
        batch = honest(self, first, count)
        return replace(batch, targets=batch.inputs.copy())

    monkeypatch.setattr(Loader, "batch", shifted)
    assert failed(recipe, store, trainer_of(recipe, store)) == {"targets are shifted by one"}


def test_attention_that_sees_the_future_fails(
    small: tuple[Recipe, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = small
    step, honest = trainer_of(recipe, store), attention._one_document

    def sees(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, first: int = 0, **options: bool
    ) -> torch.Tensor:
        return honest(q, k, v, replace(spec, causal=False), first, **options)

    monkeypatch.setattr(attention, "_one_document", sees)
    assert failed(recipe, store, step) == {"no token sees the future"}


def test_attention_that_crosses_documents_fails(
    small: tuple[Recipe, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = small
    trainer = trainer_of(recipe, store)

    def one(cls: type[Documents], tokens_BT: torch.Tensor, end_of_text: int) -> Documents:
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, 0] = True
        return cls.from_starts(starts_BT)

    monkeypatch.setattr(Documents, "from_tokens", classmethod(one))
    assert failed(recipe, store, trainer) == {"no token sees another document"}


def test_a_model_whose_gradient_does_not_arrive_does_not_overfit(small: tuple[Recipe, TokenStore]) -> None:
    recipe, store = small
    batch = trainer_of(recipe, store).task.loader(recipe, store).batch(0, 1)
    assert learning.overfits(trainer_of(recipe, store), batch).status == "ok"
    frozen = trainer_of(recipe, store)
    frozen.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    assert learning.overfits(frozen, batch).status == "FAIL"


@pytest.fixture
def trained(small: tuple[Recipe, TokenStore], tmp_path: Path) -> tuple[Recipe, TrialResult]:
    """A recipe for a trial, and a trial of six steps."""
    recipe, store = small
    recipe = trial.scaled(recipe, trainer_of(recipe, store).model.config, 1e12, 1e10)[0]
    recipe = recipe.changed(train={"steps": 6, "validate_every": 3})
    (tmp_path / "trials").mkdir()
    plan = {"peak_flops": 1e10, "memory_bytes": {"total": 1}}
    run = trial.lay_out(tmp_path / "trials", "straight", recipe, store.folder, plan)
    return recipe, trial.train(run, recipe)


def test_a_resume_that_goes_on_otherwise_fails(
    trained: tuple[Recipe, TrialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, straight = trained
    place, tokens = straight.run.path.parent, straight.run.tokens.resolve()

    def stopped(name: str) -> CheckRow:
        run = trial.lay_out(place, name, recipe, tokens, {"peak_flops": 1e10, "memory_bytes": {"total": 1}})
        return learning.same(name, straight, trial.train(run, recipe, (3,)), "stopped")

    assert stopped("exact").status == "ok"
    honest, calls = trial.run_group, list[str]()

    def group(arguments: list[str], *more: Any, **others: Any) -> str | None:
        if len(calls) == 1:  # between the stop and the new process
            path = RunFolder(Path(arguments[2])).recipe
            path.write_text(path.read_text().replace("learning_rate = 0.01", "learning_rate = 0.0101"))
        calls.append(arguments[2])
        return honest(arguments, *more, **others)

    monkeypatch.setattr(trial, "run_group", group)
    row = stopped("other-rate")
    assert row.status == "FAIL"
    assert "the loss of step 5 is" in row.evidence, "the first step whose weights differ"


def test_a_trial_that_cannot_continue_is_a_row_that_fails(
    trained: tuple[Recipe, TrialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, straight = trained
    run = trial.lay_out(straight.run.path.parent, "broken", recipe, straight.run.tokens.resolve(), {"peak_flops": 1e10})
    run.plan.unlink()
    rows = list(
        collected("exact resume", "trial", lambda: [learning.same("x", straight, trial.train(run, recipe), "")])
    )
    assert [row.status for row in rows] == ["FAIL"]
    assert "the small training failed, from its start" in rows[0].evidence
    assert str(run.path) not in rows[0].evidence, "a folder that is removed is not pointed to"


def test_samples_in_another_order_and_other_weights_are_told(trained: tuple[Recipe, TrialResult]) -> None:
    _, straight = trained
    assert straight.losses.keys() == set(range(1, 7))
    assert sum(map(len, straight.order.values())) == 6 * 8
    order = {**straight.order, 3: straight.order[4]}
    row = learning.same("a", straight, replace(straight, order=order), "x")
    assert (row.status, row.evidence) == ("FAIL", "x: step 3 reads other samples")
    assert "but weights" in learning.same("a", straight, replace(straight, weights="0" * 32), "x").evidence


def test_a_full_disk_and_too_little_memory_are_no_go(
    small: tuple[Recipe, TokenStore], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small[0].changed(train={"steps": 200}, checkpoint={"every": 4})
    run = RunFolder(runs / "small")
    assert planned.disk_row(recipe, run, 1e6, run).status == "ok"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 7_900_000))
    row = planned.disk_row(recipe, run, 1e6, run)
    assert row.status == "FAIL"
    assert "8 checkpoints 8.0 MB" in row.evidence
    plan = {"memory_bytes": {"total": 3 << 40}}
    assert planned.memory_fit(recipe, plan).status == "FAIL"


def test_what_a_sample_shows_of_the_text_says_how_many_tokens_it_has(
    small: tuple[Recipe, TokenStore], runs: Path
) -> None:
    recipe, store = small
    made = planned.expected_tokens(recipe, RunFolder(runs / "not-begun"), RunFolder(runs / "small"))
    assert sum(made.values()) == store.train_tokens + store.held_out_tokens
    counts = read_json(runs / "small" / "corpus" / "statistics.json")
    for one in counts["sources"]:
        one["bytes_in"] //= 2  # as if the sample were half of the text
    write_json(runs / "small" / "corpus" / "statistics.json", counts)
    twice = planned.expected_tokens(recipe, RunFolder(runs / "not-begun"), RunFolder(runs / "small"))
    assert sum(twice.values()) == pytest.approx(2 * sum(made.values()), rel=0.01)


def test_a_checkpoint_takes_the_bytes_that_are_planned(trained: tuple[Recipe, TrialResult]) -> None:
    from bessemer.train.task import config_of

    recipe, straight = trained
    config = config_of(recipe, TokenStore.open(straight.run.tokens).vocabulary, 0)
    stored = learning.checkpoint_bytes(straight.run.checkpoints / "step-00000006")
    assert stored == pytest.approx(planned.checkpoint_bytes(recipe, config), rel=0.1)


@pytest.mark.parametrize(
    ("every", "distance", "keep"), [(4, 8, 1), (10, 3, 1), (10, 3, 2), (10, 5, 1), (7, 20, 2), (1, 50, 1), (50, 60, 3)]
)
def test_a_rollback_is_possible_from_the_step_that_is_said(
    small: tuple[Recipe, TokenStore], every: int, distance: int, keep: int
) -> None:
    steps = 200
    held, possible = set[int](), list[bool]()
    for onset in range(1, steps + 1):
        possible.append(any(step <= onset - 1 - distance for step in held))
        if onset % every == 0:
            held = Retention(keep, distance=distance).kept(sorted(held | {onset}))
    first = possible.index(True) + 1
    is_always = all(possible[first - 1 :])  # from then on
    recipe = small[0].changed(
        train={"steps": steps}, checkpoint={"every": every, "keep": keep}, guard={"rollback_distance": distance}
    )
    row = planned.rollback_row(recipe)
    assert f"from step {first:,} of 200 on" in row.evidence
    assert row.status == ("ok" if is_always else "warn"), row.evidence
    assert f"from step {first:,} of" in planned.rollback_row(recipe.changed(train={"steps": first})).evidence
    assert "none is old enough in" in planned.rollback_row(recipe.changed(train={"steps": first - 1})).evidence


def test_the_rows_that_need_a_small_training_that_fails_are_not_here(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "run_group", lambda *_, **__: "bessemer: step 3: it broke. See its files.")
    check(recipe_file, runs, "train.optimizer.learning_rate=1e-8", expected=1)
    rows = rows_of(capsys.readouterr().out)
    assert rows["a small training ends well"]["status"] == "FAIL"
    assert (
        "of the run's own model: the small training failed, from its start: step 3"
        in rows["a small training ends well"]["evidence"]
    )
    assert {rows[name]["status"] for _, name in learning.OF_A_TRIAL} == {"not here"}
    assert rows["space for the whole run"]["status"] == "ok"
    assert "rates that usually work lie between 1e-5 and 2e-2" in rows["learning rate"]["evidence"]
    assert "0.001, in place of the recipe's 1e-08" in rows["overfits a single sequence"]["evidence"]


def test_journal_and_logs_of_a_run_must_fit_its_checkpoints(
    trained: tuple[Recipe, TrialResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained[1].run
    state = replace(GuardState(), num_rollbacks=1)
    found = begun.latest(run.checkpoints)
    assert found is not None

    def rows() -> dict[str, tuple[str, str]]:
        return {row.name: (row.status, row.evidence) for row in begun.begun_rows(run)}

    assert {status for status, _ in rows().values()} == {"ok"}
    metrics = run.metrics.read_bytes()
    run.metrics.write_bytes(metrics[:-9])
    status, said = rows()["metrics.jsonl is whole"]
    assert (status, "its last line is cut short" in said) == ("ok", True), said
    run.metrics.write_bytes(metrics[: len(metrics) // 3])
    assert rows()["metrics.jsonl is whole"][0] == "warn", "lines are missing"
    run.metrics.write_bytes(metrics.replace(b'"kind"', b'"kind', 1))
    assert "the first is line 1" in rows()["metrics.jsonl is whole"][1]
    second = metrics.index(b'"loss"', metrics.index(b'"loss"') + 1)
    run.metrics.write_bytes(metrics[:second] + b'"lots"' + metrics[second + 6 :])
    assert "1 line damaged" in rows()["metrics.jsonl is whole"][1], "a name with a byte changed"
    run.incidents.write_text('{"step": 1}\n{"st')
    assert rows()["incidents.jsonl is whole"][0] == "ok"
    pointer = run.checkpoints / "latest"
    named = pointer.read_text()
    pointer.write_text("step-99999999")
    status, said = rows()["the run's newest checkpoint is whole"]
    assert status == "warn" and "names step-99999999, which is not there; going on from the newest" in said
    pointer.write_text(named)
    run.checkpoints.rename(aside := run.path / "aside")
    status, said = rows()["the run's newest checkpoint is whole"]
    assert status == "FAIL" and "this run was trained, but no checkpoint is there" in said, "as `train` refuses it"
    aside.rename(run.checkpoints)
    monkeypatch.setattr(begun, "latest", lambda *_, **__: replace(found, facts={**found.facts, "guard": asdict(state)}))
    status, said = rows()["the journal fits the checkpoints"]
    assert status == "FAIL"
    assert "the checkpoint of step 6 knows 1 rollback, the journal 0: lines are missing" in said
    run.journal.write_text('{"kind": "rollback", "number": 2}\n')
    assert "line 1 is damaged" in rows()["the journal fits the checkpoints"][1]


def test_a_run_without_batch_and_horizon_is_warned_of_and_repetition_too(
    small: tuple[Recipe, TokenStore], runs: Path
) -> None:
    recipe, _ = small
    bare = recipe.changed(train={"global_batch_tokens": None, "steps": None, "minutes": None})
    rows = {row.name: row for row in planned.budget_rows(bare, recipe, {"parameters": 1000})}
    assert [rows[name].status for name in ("global batch", "token budget")] == ["warn", "warn"]
    (budget,) = [
        row for row in planned.budget_rows(recipe, recipe, {"parameters": 10**12}) if row.name == "token budget"
    ]
    assert (budget.status, "less than 0.01 a parameter, where about 20" in budget.evidence) == ("warn", True)
    assert rows["schedule ends with the tokens"].status == "ok"
    run = RunFolder(runs / "small")
    data = {row.name: row for row in planned.data_rows(recipe, run, run, {"epochs": {"prose": 4.5, "code": 1.0}})}
    assert data["repetition"].status == "warn"
    assert "Muennighoff" in data["repetition"].evidence
    late = recipe.changed(train={"schedule": {"warmup_steps": 24}})
    rows = {row.name: row for row in planned.budget_rows(recipe, late, {})}
    assert rows["warm-up is shorter than the run"].status == "FAIL"


def test_a_device_that_computes_wrong_or_slowly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"host": "a", "device": "x", "wrong": 0, "rate": 1e12, "fsync": 0.001, "unseen": "", "torn": False}
    facts = {
        "ranks": [{**rank, "rank": number} for number in range(4)],
        "axes": {"shard": {"bytes": 10, "processes": 4, "rate": 1e9, "right": True}},
        "skew": 0.001,
        "folder": "/data",
    }
    assert {row.status for row in machines.rows_of(facts, is_cuda=True)} == {"ok"}
    facts["ranks"][2] |= {"host": "b", "wrong": 1, "rate": 0.5e12, "unseen": "the file of rank 0"}
    facts["axes"]["shard"]["right"], facts["skew"] = False, 40.0
    rows = {row.name: row for row in machines.rows_of(facts, is_cuda=True)}
    assert {name: row.status for name, row in rows.items()} == {
        "matmul has the known answer": "FAIL", "matmul rate": "warn", "links along shard": "FAIL", "clocks agree": "warn",
        "file system": "FAIL",
    }  # fmt: skip
    assert all(
        "rank 2 on b" in rows[name].evidence for name in ("matmul has the known answer", "matmul rate", "file system")
    )
    device = devices.choose(load("demo").train)
    assert machines.known_matmul(device) == 0
    monkeypatch.setitem(machines.EDGE, "cpu", 64)
    honest = torch.Tensor.__matmul__

    def flips(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = honest(self, other)
        found[3, 5] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", flips)
    assert machines.known_matmul(device) == machines.REPEATS


def test_what_cannot_be_examined_does_not_count_as_passed() -> None:
    rows = [CheckRow("a", "b", "ok", "c " * 100), CheckRow("d", "e", "not here", "f"), CheckRow("a", "g", "warn", "h")]
    assert is_go(rows)
    assert verdict(rows) == "go: of 3 rows 1 hold, 1 are warnings, 1 could not be examined here"
    assert table(rows).index("g") < table(rows).index("e"), "rows of a topic stand together"
    assert max(map(len, table(rows).splitlines())) < 130

    def raises() -> Iterator[CheckRow]:
        yield rows[0]
        raise BessemerError("it broke")

    found = list(collected("a", "part", raises))
    assert [row.status for row in found] == ["ok", "FAIL"]
    assert not is_go(found)


def test_a_large_model_is_tried_smaller_and_said_so(small: tuple[Recipe, TokenStore]) -> None:
    recipe, store = small
    recipe = derived_keys.resolve(
        recipe.changed(
            model={"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "mlp_width": 11008, "head_dim": None},
            train={"global_batch_tokens": 2**20, "micro_batch": 1}, parallel=Parallel().model_dump(),
        ).model_copy(update={"parallel": Parallel(shard=2)}),
        store.vocabulary,
    )  # fmt: skip
    from bessemer.train.task import config_of

    few, said = trial.scaled(recipe, config_of(recipe, store.vocabulary, 0), 1e11, 4e9)
    assert few.batches.full < recipe.batches.full
    assert (few.model.layers or 99) < 32
    assert few.batches.full % 2 == 0
    assert any("of 32 layers" in one for one in said)
    assert any("sequences" in one for one in said)
    config_of(few, store.vocabulary, 0)
