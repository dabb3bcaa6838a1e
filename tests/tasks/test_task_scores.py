"""Scores on tasks: likelihoods against the whole sequence at once, what is made of them, and intervals."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.evaluate.final import contamination_of
from bessemer.recipe import load
from bessemer.run import RunFolder, read_json, read_json_lines
from bessemer.tasks import scoring
from bessemer.tasks.files import Item, open_task
from bessemer.tasks.scoring import Likelihood, ScoredModel, _choice, _interval, likelihoods, score_task
from bessemer.train.state import opened
from bessemer.train.validation import opened_task, scored_model


@pytest.fixture(scope="module")
def subject(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> ScoredModel:
    """A trained model, which scoring does not change."""
    runs = tmp_path_factory.mktemp("scores") / "runs"
    shutil.copytree(prepared / "runs", runs)
    assert run_command(["train", str(prepared / "small.toml"), "--set", f"run.dir={runs}"]) == 0
    recipe = load(runs / "small")
    store, restored = opened(recipe, RunFolder(runs / "small"))
    return scored_model(restored.trainer, store, recipe.tokenizer.end_of_text)


def by_hand(subject: ScoredModel, context: str, text: str) -> tuple[float, int]:
    """Nats of a text after a context, one sequence at a time."""
    whole = [*subject.before, *subject.tokenizer.encode(context + text)]
    start = len([*subject.before, *subject.tokenizer.encode(context.rstrip())])
    with torch.no_grad():
        log_probabilities = subject.model.logits(torch.tensor([whole]))[0].log_softmax(-1)
    return -sum(float(log_probabilities[place - 1, whole[place]]) for place in range(start, len(whole))), len(
        whole
    ) - start


PAIRS = [
    ("The quick", " brown fox"), ("", "The quick"), ("The ", "quick"), ("def", " read(self, path):\n    return path"),
    ("a", ""), ("x" * 200, " and so on"), ("The quick", " b"),
]  # fmt: skip


def test_likelihoods_are_those_of_each_sequence_alone(subject: ScoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [pair for pair in PAIRS if len(pair[0]) < 100]
    expected = [by_hand(subject, *pair) for pair in short]
    for batch in (4096, 40, 1):
        monkeypatch.setattr("bessemer.tasks.scoring.BATCH_TOKENS", batch)
        found = likelihoods(subject, short)
        for one, (nats, tokens) in zip(found, expected, strict=True):
            assert one.nats == pytest.approx(nats, rel=1e-5, abs=1e-5)
            assert one.tokens == tokens


def test_a_context_that_is_too_long_loses_its_beginning(subject: ScoredModel) -> None:
    words = "The quick brown fox reads the file and returns the lines. " * 40
    (long,) = likelihoods(subject, [(words, " brown fox")])
    assert math.isfinite(long.nats) and long.tokens > 0
    (all_text,) = likelihoods(subject, [("", words)])
    assert all_text.tokens == subject.model.config.positions_length, "a continuation that is too long keeps its end"


def test_accuracy_by_length_and_bits_per_byte() -> None:
    items = [Item("q", (" yes", " certainly not"), 1), Item("q", (" a", " b"), 0)]
    each = [
        [Likelihood(2.0, 1, False), Likelihood(3.0, 2, False)],
        [Likelihood(1.0, 1, True), Likelihood(4.0, 1, False)],
    ]
    values, rows = _choice(items, each, " ")
    assert values["accuracy"][0].tolist() == [0.0, 1.0]
    assert values["accuracy_norm"][0].tolist() == [1.0, 1.0], "3 nats over 13 characters are fewer than 2 over 3"
    assert values["bits_per_byte"][0].sum() / values["bits_per_byte"][1].sum() == pytest.approx(4.0 / math.log(2) / 16)
    assert rows[0]["best"] == 0 and rows[0]["right"] == 1
    # White space of the choice itself counts, as in the harness: 4 nats over 20 characters are fewer than 1 over 4.
    padded = [Item("if a:", ("\n                pass", "x = "), 0)]
    values, _ = _choice(padded, [[Likelihood(4.0, 2, False), Likelihood(1.0, 2, False)]], "")
    assert values["accuracy_norm"][0].tolist() == [1.0]


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator, covered = np.random.default_rng(1), 0
    for _ in range(300):
        found = _interval("accuracy", (generator.random(200) < 0.3).astype(float), np.ones(200))
        assert found["low"] <= found["value"] <= found["high"]
        covered += found["low"] <= 0.3 <= found["high"]
    assert 0.91 * 300 < covered < 0.985 * 300


def test_an_interval_of_items_that_are_all_alike_is_no_certainty() -> None:
    none, every = (_interval("exact_match", np.full(25, right), np.ones(25)) for right in (0.0, 1.0))
    assert none["low"] == none["value"] == 0.0 and none["high"] == pytest.approx(0.1332, abs=1e-4)  # Wilson, 0 of 25
    assert every["low"] == pytest.approx(1 - 0.1332, abs=1e-4) and every["value"] == every["high"] == 1.0


def test_text_in_windows_has_the_likelihood_of_its_tokens(subject: ScoredModel, tmp_path: Path) -> None:
    text = "The quick brown fox reads the file. " * 30
    (tmp_path / "own.txt").write_text(text)
    done: list[float] = []
    found = score_task(open_task("text:own.txt", tmp_path), subject, done.append).scores["bits_per_byte"]
    assert sum(done) == pytest.approx(1), "one item, however many windows"
    assert found["low"] is None and found["high"] is None, "of one text"
    length, ids = subject.model.config.sequence_length, subject.tokenizer.encode(text)
    nats = 0.0
    for start in range(0, len(ids), length):
        window = [*(subject.before if start == 0 else [ids[start - 1]]), *ids[start : start + length]]
        with torch.no_grad():
            log_probabilities = subject.model.logits(torch.tensor([window[:-1]]))[0].log_softmax(-1)
        nats -= float(log_probabilities[-(len(ids[start : start + length])) :].gather(
            1, torch.tensor(window[-len(ids[start : start + length]) :])[:, None]).sum())  # fmt: skip
    assert found["value"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)


def test_tasks_are_scored_while_training_and_after(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"goal": f"read {n}", "sol1": "the file", "sol2": "zq vx jk", "label": 0, "text": f"The quick brown {n}"}
        for n in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [f"piqa:{tmp_path / 'rows.jsonl'}", f"lambada:{tmp_path / 'rows.jsonl'}"]
    given = [
        str(recipe_file),
        "--set",
        f"run.dir={runs}",
        "--set",
        f"evaluate.tasks={json.dumps(tasks)}",
        "--set",
        "evaluate.task_items=7",
        "--set",
        "train.schedule.kind=constant",
    ]
    assert run_command(["train", *given]) == 0
    logged = [row for row in read_json_lines(runs / "small" / "metrics.jsonl") if row["kind"] == "tasks"]
    validations = [row for row in read_json_lines(runs / "small" / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["step"] for row in logged] == [row["step"] for row in validations]
    assert set(logged[0]["bits_per_byte"]) == {"piqa", "lambada"} and set(logged[0]["accuracy"]) == {"piqa", "lambada"}
    assert all(math.isfinite(value) for row in logged for value in row["bits_per_byte"].values())
    assert run_command(["evaluate", str(runs / "small")]) == 0
    said = capsys.readouterr()
    assert "the corpus was not searched for it" in said.out and "piqa: accuracy " in said.err
    found = {task["name"]: task for task in read_json(runs / "small" / "evaluation.json")["tasks"]}
    assert found["piqa"]["items"] == 30 and found["piqa"]["scores"]["accuracy"]["value"] > 0.5
    assert len(read_json_lines(runs / "small" / "tasks" / "piqa.jsonl")) == 30
    assert run_command(["report", str(runs / "small")]) == 0
    page = (runs / "small" / "report.html").read_text()
    assert 'id="tasks"' in page and "tasks-bits_per_byte" in page
    # A task of another command is added to those of the same checkpoint; two of one name would take each other's place.
    (tmp_path / "other.toml").write_text(
        'name = "other"\nkind = "cloze"\ndata = "rows.jsonl"\nprompt = "read"\ntarget = "{{ text }}"\n'
    )
    assert run_command(["evaluate", str(runs / "small"), "--task", str(tmp_path / "other.toml")]) == 0
    assert {task["name"] for task in read_json(runs / "small" / "evaluation.json")["tasks"]} == {
        "piqa",
        "lambada",
        "other",
    }
    assert run_command(["evaluate", str(runs / "small"), "--forget", "piqa"]) == 2
    assert "--forget piqa: is a task of the recipe" in capsys.readouterr().err
    assert run_command(["evaluate", str(runs / "small"), "--forget", "other"]) == 0
    assert {task["name"] for task in read_json(runs / "small" / "evaluation.json")["tasks"]} == {"piqa", "lambada"}
    assert run_command(["evaluate", str(runs / "small"), "--task", str(tmp_path / "other.toml")]) == 0
    # Another precision is scored anew, and the next command scores in the run's own.
    for asked, expected in ((["--set", "train.precision=fp64"], "fp64"), ([], "fp32")):
        assert run_command(["evaluate", str(runs / "small"), *asked]) == 0
        scored = read_json(runs / "small" / "evaluation.json")
        assert scored["precision"] == expected
        assert {task["name"]: task["precision"] for task in scored["tasks"]}["piqa"] == expected
    # Data that were changed are scored anew by the same command.
    assert run_command(["evaluate", str(runs / "small")]) == 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    assert run_command(["evaluate", str(runs / "small")]) == 0
    found = {task["name"]: task["items"] for task in read_json(runs / "small" / "evaluation.json")["tasks"]}
    assert found == {"piqa": 20, "lambada": 20}
    assert "other: the task or its data has changed since it was scored" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    opened_task.cache_clear()  # as in a process of its own
    assert run_command(["train", *given, "--set", f"train.steps={logged[-1]['step'] + 5}"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"evaluate.tasks: piqa: the task or its data has changed since step {logged[-1]['step']};" in said
    tags = EventAccumulator(str(runs / "small" / "tensorboard")).Reload().Tags()["scalars"]
    assert "tasks/accuracy/piqa" in tags and not any("content" in tag for tag in tags)
    (tmp_path / "again.toml").write_text((tmp_path / "other.toml").read_text())
    both = ["--task", str(tmp_path / "other.toml"), "--task", str(tmp_path / "again.toml")]
    assert run_command(["evaluate", str(runs / "small"), *both]) == 2
    assert "two tasks have one name (other)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (['evaluate.tasks=["none.toml"]'], "no task file"),
        (['evaluate.tasks=["piqa:DATA","piqa:DATA"]'], "two tasks have one name"),
    ],
)
def test_tasks_are_looked_at_before_anything_is_done(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str], complaint: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n')
    values = [one.replace("DATA", str(data)) for one in (f"run.dir={tmp_path / 'new'}", *sets)]
    assert run_command(["run", str(recipe_file), *(part for one in values for part in ("--set", one))]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "target", "says"),
    [
        ("The quic", "k", None), ("def re", "turn", None), ("The", " word" * 400, "has more than the model's 32 tokens"),
        ("word " * 200, " fox", ""),
    ],
)  # fmt: skip
def test_an_answer_is_scored_whole_or_not_at_all(
    subject: ScoredModel, tmp_path: Path, prompt: str, target: str, says: str | None
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "target": target}) + "\n")
    (tmp_path / "own.toml").write_text(
        'name = "own"\nkind = "cloze"\njoiner = ""\ndata = "rows.jsonl"\nprompt = "{{ prompt }}"\ntarget = "{{ target }}"\n'
    )
    task = open_task("own.toml", tmp_path)
    joined = len(subject.tokenizer.encode(prompt + target)) <= len(subject.tokenizer.encode(prompt))
    if says is None and not joined:
        pytest.skip("this tokenizer does not join them")
    if says == "":
        assert score_task(task, subject).cut == 1
        return
    with pytest.raises(InputError, match=says or "adds no token to the prompt's end") as error:
        score_task(task, subject)
    assert "rows.jsonl, row 1: the answer" in str(error.value)


@pytest.mark.parametrize("rows", [['{"text": ""}'], ['{"text": "abc"}', '{"text": " "}']])
def test_an_empty_text_is_no_item(tmp_path: Path, rows: list[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(InputError, match=f"row {len(rows)}: an empty text, of which there is nothing to score"):
        open_task("text:rows.jsonl", tmp_path)


def test_contamination_is_that_of_the_same_data_or_says_whose_it_is(tmp_path: Path) -> None:
    for name, text in (("mine", "a row"), ("copy", "a row"), ("other", "another row")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'''[run]\nname = "r"\ndir = "{tmp_path}"\n[[corpus.sources]]\nname = "a"\npaths = ["{tmp_path}/*.txt"]
[[corpus.contamination.sets]]\nname = "lambada"\npath = "{tmp_path}/other.jsonl"\nfields = ["text"]
[[corpus.contamination.sets]]\nname = "quiz"\npath = "{tmp_path}/copy.jsonl"\nfields = ["text"]\n'''
    )
    run = RunFolder(tmp_path / "r")
    run.corpus.mkdir(parents=True)
    found = [{"name": "lambada", "items_touched": 3}, {"name": "quiz", "items_touched": 0}]
    (run.corpus / "statistics.json").write_text(json.dumps({"contamination": found}))

    def said(reference: str) -> str:
        return contamination_of(open_task(reference), load(recipe), run)

    assert said(f"lambada:{tmp_path}/mine.jsonl") == "none found in the corpus", "a copy was searched for as quiz"
    assert said(f"lambada:{tmp_path}/other.jsonl").startswith("3 items found in the corpus; their documents were")
    (tmp_path / "copy.jsonl").unlink()
    assert said(f"lambada:{tmp_path}/mine.jsonl").endswith(
        f"(by the set of that name, of other data: {tmp_path}/other.jsonl)"
    )
    assert said(f"text:{tmp_path}/mine.jsonl") == "the corpus was not searched for it"


@pytest.mark.parametrize(
    "keys",
    [
        'kind = "exact"\nprompt = "{{ a }}"\nanswers = "b"\nstop = "."\n',
        'kind = "cloze"\nprompt = "{{ a }}"\ntarget = "{{ b }}"\n', 'kind = "text"\ntext = "{{ a }}"\n',
    ],
)  # fmt: skip
def test_special_tokens_in_tasks_are_text(
    subject: ScoredModel, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, seen, scored = subject.tokenizer.end_of_text_token, list[list[int]](), scoring._score_ids

    def generated(model: object, ids: list[int], **more: object) -> Iterator[int]:
        seen.append(ids)
        return iter([])

    def score(one: ScoredModel, pairs: list[tuple[list[int], list[int]]], advance: Callable[[float], None]) -> object:
        seen.extend([*context, *text] for context, text in pairs)
        return scored(one, pairs, advance)

    monkeypatch.setattr("bessemer.model.generation.generate", generated)
    monkeypatch.setattr(scoring, "_score_ids", score)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": f"a {token} b{token}", "b": f"c{token}"}) + "\n")
    (tmp_path / "own.toml").write_text(f'name = "own"\ndata = "rows.jsonl"\n{keys}')
    score_task(open_task("own.toml", tmp_path), subject)
    assert seen and all(subject.tokenizer.end_of_text not in ids[len(subject.before) :] for ids in seen)
