"""Evaluation tasks: their files, scores during and after training, and mistakes."""

import gzip
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.evaluate.final import contamination_of
from bessemer.evaluate.task_files import open_tasks
from bessemer.recipe import load, load_resolved
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_json_lines
from bessemer.train.setup import ScoredModel
from bessemer.train.state import load_model
from bessemer.train.validation import scored_model

pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
from bessemer.evaluate.harness import score_task

CHOICE = """output_type: multiple_choice
doc_to_text: "{{goal}}"
doc_to_choice: "{{[sol1, sol2]}}"
doc_to_target: label
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
CLOZE = """output_type: loglikelihood
doc_to_text: "{{goal}}"
doc_to_target: "{{sol1}}"
metric_list:
  - {metric: acc}
  - {metric: perplexity}
"""
TEXT = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{sol1}}"
metric_list:
  - {metric: bits_per_byte}
"""
ROWS = [{"goal": f"read {n}", "sol1": "the file", "sol2": "zq vx jk", "label": 0} for n in range(30)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder: Path, name: str, text: str, data: str = "rows.jsonl") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n{text}"
    )
    return str(path)


@pytest.fixture(scope="module")
def subject(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> ScoredModel:
    """A trained model, which scoring does not change."""
    runs = tmp_path_factory.mktemp("scores") / "runs"
    shutil.copytree(prepared / "runs", runs)
    assert run_command(["train", str(prepared / "small.toml"), "--set", f"run.dir={runs}"]) == 0
    recipe = load_resolved(runs / "small")
    store, restored = load_model(recipe, RunDirectory(runs / "small"))
    return scored_model(restored.trainer, store, recipe.tokenizer.end_of_text)


def test_likelihoods_in_a_batch_equal_those_of_single_sequences(subject: ScoredModel, tmp_path: Path) -> None:
    """Check this in any batch; special tokens in a task are text; compressed data can be read."""
    end = subject.tokenizer.end_of_text_token
    pairs = [
        ("The quick", " brown fox"), ("", "The quick"), ("The ", "quick"), ("def", " read(self, path):\n    return"),
        ("The quick", " b"), (f"a {end} b", f" c{end}"),
    ]  # fmt: skip
    rows = [{"goal": context, "sol1": text} for context, text in pairs]
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (task,) = open_tasks([write_task(tmp_path, "own", CLOZE + "target_delimiter: ''\n", "rows.jsonl.gz")])
    scored, found = score_task(task, subject)
    expected = []
    for context, text in pairs:
        ids = [*subject.before, *subject.tokenizer.encode(context + text)]
        start = len([*subject.before, *subject.tokenizer.encode(context.rstrip())])
        with torch.no_grad():
            log_probabilities = subject.model.logits(torch.tensor([ids]))[0].log_softmax(-1)
        expected.append(sum(float(log_probabilities[place - 1, ids[place]]) for place in range(start, len(ids))))
    assert [row["resps"][0][0][0] for row in found] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert scored["scores"]["perplexity"]["value"] == pytest.approx(math.exp(-sum(expected) / len(pairs)), rel=1e-5)
    assert (scored["items"], scored["few_shot"], scored["cut"], scored["kind"]) == (len(pairs), 0, 0, "loglikelihood")
    assert len(score_task(task, subject, limit=2)[1]) == 2


def test_tasks_are_scored_while_training_and_after(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "rows.jsonl", runs / "small"
    write_rows(data, ROWS)
    tasks = [write_task(tmp_path, "choice", CHOICE), write_task(tmp_path, "text", TEXT)]
    sets = [
        f"run.dir={runs}",
        f"evaluate.tasks={json.dumps(tasks)}",
        "evaluate.task_items=7",
        "train.schedule.kind=constant",
    ]
    given = [str(recipe_file), *(part for one in sets for part in ("--set", one))]
    assert run_command(["train", *given]) == 0
    logged = [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "tasks"]
    validations = [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["step"] for row in logged] == [row["step"] for row in validations]
    assert set(logged[0]["bits_per_byte"]) == {"text"} and set(logged[0]["acc"]) == {"choice"}
    assert all(math.isfinite(row["bits_per_byte"]["text"]) for row in logged)

    def evaluate(*given: str) -> dict[str, dict[str, Any]]:
        assert run_command(["evaluate", str(run), *given]) == 0
        return {task["name"]: task for task in read_json(run / "evaluation.json")["tasks"]}

    found = evaluate()
    said = capsys.readouterr()
    assert "the corpus was not searched for it" in said.out and "choice: acc " in said.err
    score = found["choice"]["scores"]["acc"]
    assert found["choice"]["items"] == 30 and score["value"] > 0.5 and found["choice"]["data"] == str(data)
    assert len(read_json_lines(run / "tasks" / "choice.jsonl")) == 30
    assert run_command(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert 'id="tasks"' in page and "tasks-bits_per_byte" in page and "tasks-acc_norm" in page
    assert set(evaluate("--task", write_task(tmp_path, "other", CLOZE))) == {"choice", "text", "other"}
    # The same command scores changed data again.
    write_rows(data, ROWS[:20])
    assert {name: task["items"] for name, task in evaluate().items()} == {"choice": 20, "text": 20}
    tags = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"]
    assert "tasks/acc/choice" in tags and not any("content" in tag for tag in tags)


def test_the_interval_is_that_of_a_mean(subject: ScoredModel, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{**row, "label": n % 2} for n, row in enumerate(ROWS)])
    (task,) = open_tasks([write_task(tmp_path, "own", CHOICE)])
    score = score_task(task, subject)[0]["scores"]["acc"]
    wilson = stats.binomtest(15, 30).proportion_ci(method="wilson")
    assert score["value"] == 0.5 and (score["low"], score["high"]) == pytest.approx(tuple(wilson), abs=1e-5)
    write_rows(tmp_path / "rows.jsonl", ROWS[:4])
    (task,) = open_tasks([write_task(tmp_path, "own", CHOICE)])
    score, wilson = score_task(task, subject)[0]["scores"]["acc"], stats.binomtest(4, 4).proportion_ci(method="wilson")
    assert score["value"] == 1.0 and (score["low"], score["high"]) == pytest.approx(tuple(wilson), abs=1e-5)
    write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    (task,) = open_tasks([write_task(tmp_path, "own", CHOICE)])
    assert score_task(task, subject)[0]["scores"]["acc"] == {"value": 1.0, "low": None, "high": None}


@pytest.mark.parametrize(
    ("text", "rows", "says"),
    [
        (CLOZE, None, "rows.jsonl"), (CLOZE, "", "rows.jsonl"), (CLOZE, '{"goal": "a", "sol1": "b"}\n{"go', "rows.jsonl"),
        (CLOZE.replace("goal", "goal.upper()"), '{"goal": "a", "sol1": "b"}\n{"sol1": "b"}', "upper"), ("output_type: guess\n", "{}", "guess"),
        ("doc_to_text: [\n", "{}", "line"), (CLOZE.replace("{{goal}}", "{{goal"), '{"goal": "a", "sol1": "b"}', "template"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_loaded_is_one_error(tmp_path: Path, text: str, rows: str | None, says: str) -> None:
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(InputError) as error:
        open_tasks([write_task(tmp_path, "own", text)])
    assert says in str(error.value) and "own.yaml" in str(error.value) and "\n" not in str(error.value)


def test_tasks_are_loaded_before_other_work(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    own = write_task(tmp_path, "own", CHOICE)
    shutil.copy(own, tmp_path / "again.yaml")
    for tasks, says in ((["none.yaml"], "none.yaml"), ([own, str(tmp_path / "again.yaml")], "evaluate.tasks")):
        sets = (f"run.dir={tmp_path / 'new'}", f"evaluate.tasks={json.dumps(tasks)}")
        assert run_command(["run", str(recipe_file), *(part for one in sets for part in ("--set", one))]) == 2
        assert says in capsys.readouterr().err
    # Without the optional package.
    code = (
        "import sys; sys.modules['lm_eval'] = None\nfrom bessemer.common.errors import InputError\n"
        f"from bessemer.evaluate.task_files import open_tasks\ntry: open_tasks([{own!r}])\n"
        "except InputError as error: print(error)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'bessemer[tasks]'" in made.stdout
    # A recipe without tasks imports nothing of the harness.
    code = "import sys, bessemer.workflow.stages, bessemer.train.loop, bessemer.evaluate.final; print('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("goal", "answer", "says"),
    [("a", "", "has 0 tokens"), ("The", " word" * 400, "evaluate.tasks"), ("word " * 200, " fox", "")],
)
def test_an_answer_is_scored_completely_or_not_at_all(
    subject: ScoredModel, tmp_path: Path, goal: str, answer: str, says: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"goal": goal, "sol1": answer}])
    (task,) = open_tasks([write_task(tmp_path, "own", CLOZE + "target_delimiter: ''\n")])
    if says:
        with pytest.raises(InputError, match=says):
            score_task(task, subject)
    else:
        assert score_task(task, subject)[0]["cut"] == 1


def test_contamination_is_reported_for_the_same_data_or_names_the_other(tmp_path: Path) -> None:
    for name in ("mine", "copy", "other"):
        write_rows(tmp_path / f"{name}.jsonl", [{"goal": "a", "sol1": "a row"}])
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'''[run]\nname = "r"\ndir = "{tmp_path}"\n[[corpus.sources]]\nname = "a"\npaths = ["{tmp_path}/*.txt"]
[[corpus.contamination.sets]]\nname = "quiz"\npath = "{tmp_path}/other.jsonl"\nfields = ["sol1"]
[[corpus.contamination.sets]]\nname = "set"\npath = "{tmp_path}/copy.jsonl"\nfields = ["sol1"]\n'''
    )
    run = RunDirectory(tmp_path / "r")
    run.corpus.mkdir(parents=True)
    found = [{"name": "quiz", "items_touched": 3}, {"name": "set", "items_touched": 0}]
    (run.corpus / "statistics.json").write_text(json.dumps({"contamination": found}))

    def said(name: str, data: str) -> str:
        (task,) = open_tasks([write_task(tmp_path, name, CLOZE, f"{data}.jsonl")])
        return contamination_of(task, load(recipe), run)

    assert said("quiz", "copy") == "none of the set set found in the corpus"
    assert said("own", "other").startswith("3 items of the set quiz found in the corpus; their documents were")
    assert said("quiz", "mine").startswith("3 items of the set quiz found in the corpus")
    assert said("text", "mine") == "the corpus was not searched for it"
