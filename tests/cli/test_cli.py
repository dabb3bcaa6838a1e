"""Commands as a user runs them: end to end, repeated, killed, stopped, and with wrong input."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bessemer.cli import run_command
from bessemer.common import log_file
from bessemer.guard.goodput import read_sessions, summarize_sessions
from bessemer.run.files import read_json_lines
from tests.changed_stage import record_again
from tests.cli.commands import bessemer, command, interrupted, resumed, start, wait_for_step
from tests.conftest import recipe_text, write_text
from tests.newest import training_result


@pytest.fixture(scope="session")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained without interruption, evaluated, exported and reported."""
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("whole")
    shutil.copytree(prepared / "runs", place / "runs")
    done = bessemer("run", prepared / "small.toml", "--set", f"run.dir={place / 'runs'}")
    assert done.returncode == 0, done.stderr
    return place / "runs"


def test_a_run_directory_has_the_expected_files(whole: Path) -> None:
    folder = whole / "small"
    for name in ("recipe.toml", "environment.json", "corpus/statistics.json", "tokens/manifest.json", "tokens/tokenizer.json",
                 "plan.json", "checkpoints/latest", "metrics.jsonl", "mixture.json", "evaluation.json", "export/config.json",
                 "export/model.safetensors", "report.html", "tensorboard", "stages.json"):  # fmt: skip
        assert (folder / name).exists(), name
    rows = read_json_lines(folder / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    assert len(train) == 24
    logged = "loss loss_by_source grad_norm learning_rate tokens_per_second mfu data_wait memory_bytes"
    assert set(logged.split()) <= set(train[0])
    assert set(train[0]["loss_by_source"]) == {"prose", "code"}
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert {row["step"] for row in rows if row["kind"] == "validation"} >= {24}
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert 0 < evaluation["ngram"]["bits_per_byte"] < 8
    if find_spec("pyppmd"):
        assert 0 < evaluation["ppmd"]["bits_per_byte"] < evaluation["ngram"]["bits_per_byte"]
    mixture = json.loads((folder / "mixture.json").read_text())
    assert mixture["samples"] == 24 * 8
    assert mixture["largest_deviation"] <= 1 / mixture["samples"] + 1 / 8192
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_a_special_token_in_a_prompt_is_encoded_as_in_transformers_and_reported(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BESSEMER_QUIET", raising=False)
    for prompt, times in (("a <|endoftext|> b", 1), ("a < b", 0)):
        assert command("generate", whole / "small", prompt, "--temperature", "0", "--max-tokens", "2") == 0
        assert capsys.readouterr().err.count("<|endoftext|>") == times


def test_an_export_has_a_model_card(whole: Path) -> None:
    from huggingface_hub import ModelCard

    folder = whole / "small"
    text = (folder / "export/README.md").read_text()
    card = ModelCard(text).data
    assert (card.library_name, card.pipeline_tag, card.license) == ("transformers", "text-generation", "unknown")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    (result,) = card.eval_results or ()
    assert result.metric_value == pytest.approx(evaluation["bits_per_byte"], rel=1e-5)
    sources = json.loads((folder / "tokens/manifest.json").read_text())["sources"]
    for name, splits in sources.items():
        cells = [f"{splits[split][kind]:,}" for split in ("train", "heldout") for kind in ("documents", "tokens")]
        assert f"| {name} | {' | '.join(cells)} |" in text
    assert f"| bits per byte | {evaluation['bits_per_byte']:.4f} |" in text
    assert str(whole) not in text and str(Path.home()) not in text  # no path of this machine
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = code.replace("path/to/this/folder", str(folder / "export"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Once upon a time" in ran.stdout


def test_a_run_becomes_a_gguf_file(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf")
    run = str(whole / "small")
    assert command("export", run, tmp_path / "out", "--to", "gguf", "--dtype", "q8_0", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    made = {"small-Q8_0.gguf", "Modelfile", "README.md", "bessemer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == made
    assert (found["gguf"], found["type"], found["pre_tokenizer"]) == ("small-Q8_0.gguf", "Q8_0", "llama-bpe")
    reader = gguf.GGUFReader(tmp_path / "out/small-Q8_0.gguf")
    ids = json.loads((whole / "small/tokens/tokenizer.json").read_text())["model"]["vocab"]
    assert reader.fields["tokenizer.ggml.tokens"].contents() == sorted(ids, key=ids.get)
    assert "FROM ./small-Q8_0.gguf\n" in (tmp_path / "out/Modelfile").read_text()
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: gguf" in card and "llama-cli -m small-Q8_0.gguf" in card
    # Another type or layout replaces it; tensors that the layout lacks are an error and nothing changes.
    assert command("export", run, tmp_path / "out", "--dtype", "q8_0") == 2
    assert "--dtype q8_0" in capsys.readouterr().err
    assert (tmp_path / "out/small-Q8_0.gguf").exists()
    assert command("export", run, tmp_path / "out", "--dtype", "bfloat16") == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and not list((tmp_path / "out").glob("*.gguf"))


def test_a_second_run_skips_everything(whole: Path, recipe_file: Path) -> None:
    before = training_result(whole / "small")
    done = bessemer("run", recipe_file, "--set", f"run.dir={whole}", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    stages = {row["name"]: row["skipped"] for row in json.loads(done.stdout)["stages"]}
    done_before = ("corpus", "tokens", "plan", "train", "evaluate", "export")
    assert stages == {**dict.fromkeys(done_before, True), "report": False}
    assert training_result(whole / "small") == before


@pytest.mark.long
@pytest.mark.fault(26)
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile on a CPU needs a C++ compiler, g++ or $CXX",
)
def test_a_compiled_training_resumes_bit_for_bit(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    """Resume in a new process that compiles again: after a kill, and after a stop, with dropout and a moving average."""
    sets = [
        part for one in ("train.compile=on", "train.ema=0.9", "train.dropout.hidden=0.1") for part in ("--set", one)
    ]
    straight = tmp_path / "straight"
    shutil.copytree(runs, straight)
    done = bessemer("train", recipe_file, "--set", f"run.dir={straight}", *sets)
    assert done.returncode == 0 and ", compiled" in done.stderr, done.stderr
    for step, number, code in ((11, signal.SIGKILL, -signal.SIGKILL), (19, signal.SIGTERM, 75)):
        assert interrupted(recipe_file, runs, step, number, *sets)[0] == code
    done = bessemer("train", recipe_file, "--set", f"run.dir={runs}", *sets)
    assert done.returncode == 0 and "continuing from step" in done.stderr, done.stderr
    assert training_result(runs / "small") == training_result(straight / "small")


@pytest.mark.fault(1)
@pytest.mark.fault(9)
@pytest.mark.fault(26)
def test_kills_and_a_stop_do_not_change_the_result(whole: Path, runs: Path, recipe_file: Path) -> None:
    """Kills before and after the first checkpoint, and a signal that finishes its step, saves and exits with 75."""
    log, signals = runs / "small" / "time.jsonl", ((3, signal.SIGKILL), (9, signal.SIGKILL), (14, signal.SIGTERM))
    for session, (step, number) in enumerate(signals, 1):
        process = start(recipe_file, runs)
        # The step may come from the previous session, which ran for a moment after it was seen.
        while (taken := summarize_sessions(read_sessions(log))) is None or taken["sessions"] < session:
            assert process.poll() is None
            time.sleep(0.005)
        wait_for_step(runs / "small", step, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert process.returncode == (75 if number == signal.SIGTERM else -number), said
    rows = [row["step"] for row in read_json_lines(runs / "small" / "metrics.jsonl")]
    newest = (runs / "small" / "checkpoints" / "latest").read_text()
    assert newest == f"step-{max(rows):08}", "no finished step is lost"
    assert resumed(recipe_file, runs) == training_result(whole / "small")
    # Includes sessions killed in their first seconds.
    taken = summarize_sessions(read_sessions(log))
    assert taken is not None and taken["sessions"] == 4 and taken["stopped_by"] is None
    assert [restart["stopped_by"] for restart in taken["restarts"]] == [None, None, "SIGTERM"]
    assert all(restart["stopped"] < restart["time"] for restart in taken["restarts"])


def test_a_stop_in_any_stage_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_text(tmp_path / "text", documents=300)
    (tmp_path / "small.toml").write_text(recipe_text(tmp_path))
    run = [sys.executable, "-m", "bessemer", "run", str(tmp_path / "small.toml")]
    for seconds in (0.6, 1.4, 2.1):
        process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
        if process.returncode == 0:  # finished before the signal
            break
        assert process.returncode in (75, -signal.SIGINT), said  # too early for Python's signal handlers
        assert "Traceback" not in said or process.returncode == -signal.SIGINT
        left = list((tmp_path / "runs").rglob(".*.tmp")) if (tmp_path / "runs").exists() else []
        # The next start removes a work folder, which is for what a stop interrupted.
        assert [path for path in left if not {"corpus.work", "tokens.work"} & set(path.parts)] == []
    done = bessemer("run", tmp_path / "small.toml")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").rglob(".*.tmp")) == []
    assert not list((tmp_path / "runs").rglob("*.work"))


@pytest.mark.fault(29)
def test_another_recipe_in_the_same_run_directory_is_an_error(
    whole: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"run.dir={whole}"
    assert command("train", recipe_file, "--set", here, "--set", "train.z_loss=0.1") == 2
    said = capsys.readouterr().err
    assert "train.z_loss: 0.0 -> 0.1" in said
    assert "train.start" in said
    assert command("run", recipe_file, "--set", here, "--set", "corpus.rules.min_characters=21") == 2
    assert "its checkpoints were trained on the old one" in capsys.readouterr().err
    assert command("train", recipe_file, "--set", here, "--set", "evaluate.top_k=3", "--set", "checkpoint.keep=2") == 0


def test_a_restart_removes_the_earlier_training(whole: Path, recipe_file: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    here, folder = ["--set", f"run.dir={tmp_path / 'runs'}"], tmp_path / "runs" / "small"
    assert command("train", recipe_file, *here, "--set", "train.z_loss=0.1", "--restart") == 0
    assert not (folder / "export").exists() and (folder / "corpus").exists()
    assert training_result(folder) != training_result(whole / "small")
    assert command("train", recipe_file, *here, "--restart") == 0
    assert training_result(folder) == training_result(whole / "small")


LASTING = """
import os, signal, subprocess, sys
streams, *command = sys.argv[1:]
if streams == "daemon":
    for number in (0, 1, 2):
        os.close(number)
    os.execv(command[0], command)
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
process.stdout.readline()
process.stdout.close()
sys.exit(process.wait())
"""


@pytest.mark.parametrize("streams", ["reader", "daemon"])
def test_a_training_survives_closed_output_streams(streams: str, whole: Path, runs: Path, recipe_file: Path) -> None:
    """Test `2>&1 | head -1`, and a daemon that has closed the streams: no file gets the number of a closed stream."""
    train = [sys.executable, "-m", "bessemer", "train", str(recipe_file), "--set", f"run.dir={runs}"]
    command = [sys.executable, "-c", LASTING, streams, *train]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert training_result(runs / "small") == training_result(whole / "small")
    for line in (runs / "small" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("beside", ["true", "false"])
@pytest.mark.fault(7)
@pytest.mark.usefixtures("fixed_step_time")
def test_a_full_disk_does_not_end_a_training(
    beside: str, runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(runs)
    calls = []

    def scarce(path: object) -> Any:
        calls.append(path)
        return usage._replace(free=10 if len(calls) <= 2 else usage.free)

    append, refused = log_file._append_whole, list[str]()

    def full(path: Path, data: bytes) -> None:
        refused.append(path.name)
        if refused.count(path.name) <= (12 if path.name == "incidents.jsonl" else 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, data)

    monkeypatch.setattr(shutil, "disk_usage", scarce)
    monkeypatch.setattr(log_file, "_append_whole", full)
    sets = ("--set", f"run.dir={runs}", "--set", f"checkpoint.asynchronous={beside}")
    assert command("train", recipe_file, *sets) == 0
    said = capsys.readouterr().err
    assert "0 B" in said and said.count("tries again") == 2
    assert "the checkpoint of step 8 failed: " in said and "last good one: the start" in said
    logs = {name.split(".")[0] for name in refused}
    assert logs == {"incidents", "metrics", "time", "events"}
    assert said.count("No space left on device") == len(logs)  # one for each
    assert [row["what"] for row in read_json_lines(runs / "small" / "incidents.jsonl")] == ["checkpoint_failed"] * 2
    rows = [row["step"] for row in read_json_lines(runs / "small" / "metrics.jsonl") if row["kind"] == "train"]
    assert rows == list(range(1, 25))
    events = EventAccumulator(str(runs / "small" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == rows


@pytest.mark.usefixtures("fixed_step_time")
def test_a_disk_that_stays_full_is_an_error_with_advice(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage, calls = shutil.disk_usage(runs), list[object]()

    def scarce(path: object) -> Any:
        calls.append(path)
        return usage._replace(free=usage.free if len(calls) == 1 else 10)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", scarce)
        assert command("train", recipe_file, "--set", f"run.dir={runs}") == 1
    assert command("train", recipe_file, "--set", f"run.dir={runs}") == 0
    assert "from step 8 of 24" in capsys.readouterr().err


@pytest.mark.fault(25)
def test_resuming_on_rebuilt_tokens_is_an_error(
    whole: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    folder = tmp_path / "runs" / "small"
    shutil.rmtree(folder / "checkpoints" / "step-00000024")
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (folder / "tokens" / "manifest.json").write_text(json.dumps(manifest))
    record_again(folder / "tokens")
    assert command("train", recipe_file, "--set", f"run.dir={tmp_path / 'runs'}") == 2
    assert "the token shards have changed since step-00000016 was saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["corpus.sources.code.paths=['/no/such/place']"], "/no/such/place"),
        (["corpus.rules.min_characters=100000"], "too_short"),
        (["tokenizer.vocabulary=90000"], "tokenizer.vocabulary: 90000"),
        (["tokens.sequence_length=1000000", "train.global_batch_tokens=8000000"], "tokens.sequence_length: 1000000"),
        (["tokenizer.path='/no/such/tokenizer.json'", "tokenizer.vocabulary=nan"], "vocabulary"),
    ],
)  # fmt: skip
def test_wrong_input_gives_a_one_line_error_and_writes_nothing(
    recipe_file: Path, tmp_path: Path, overrides: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for value in (f"run.dir={tmp_path / 'runs'}", *overrides) for part in ("--set", value)]
    assert command("run", recipe_file, *sets) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    assert len(said) == 1
    assert complaint in said[0]
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.usefixtures("fixed_step_time")
def test_a_run_directory_can_replace_its_recipe(
    whole: Path, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "small", tmp_path / "moved")
    folder = tmp_path / "moved"
    plans = []
    for reference in (recipe_file, folder):
        assert command("plan", reference, "--json") == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["parameters"] == plans[1]["parameters"] and plans[0]["steps"] == plans[1]["steps"]
    assert command("plan", folder, "--gpus", "2xH100") == 0
    assert command("launch", folder, "--on", "slurm") == 0
    assert (folder / "launch" / "train.sbatch").exists(), "of the folder as it lies now"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command("ladder", folder, "--design", "none")
    assert "design" in capsys.readouterr().err
    for name in ("corpus", "tokens", "train", "run"):
        monkeypatch.setattr(
            f"bessemer.workflow.stages.{'run_all' if name == 'run' else name}", lambda *arguments, **options: None
        )
        monkeypatch.setattr("bessemer.workflow.prepare.prepare", lambda *arguments: None)
        assert command(name, folder) == 0, name
    assert command("plan", tmp_path) == 2
    assert "neither a recipe nor a run directory" in capsys.readouterr().err


def test_a_run_directory_under_another_name_starts_another_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = training_result(whole / "small")
    sets = ["--set", "run.name=other", "--set", f"run.dir={tmp_path}", "--set", "train.steps=2"]
    assert command("run", whole / "small", *sets) == 0
    assert training_result(tmp_path / "other")[0] == 2 and training_result(whole / "small") == before
    assert command("evaluate", whole / "small", "--set", "run.name=other") == 2
    assert "a run directory keeps its name" in capsys.readouterr().err


def test_missing_files_are_input_errors(tmp_path: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = ("--set", f"run.dir={tmp_path / 'new'}")
    for arguments, key in [
        (("run", tmp_path / "none.toml"), "none.toml"),
        (("report", tmp_path), str(tmp_path)),
        (("train", recipe_file, *new), f"bessemer tokens {recipe_file}"),
        (("tokens", recipe_file, *new), f"bessemer corpus {recipe_file}"),
        (("generate", recipe_file, "x", *new), str(tmp_path / "new")),
        (("recipe", "demoo"), "demoo"),
        (("recipe", "--explain", "train.stepz"), "train.steps"),
    ]:
        assert command(*arguments) == 2, arguments
        assert key in capsys.readouterr().err


def test_generate_trace_and_export_on_a_run(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole / "small"
    assert command("trace", folder, "--step", "3", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["sample"] for row in rows} == set(range(16, 24))
    assert command("trace", folder, "--step", "3", "--text") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["sample", "source", "document", "path", "text"] and len(lines) == 1 + len(rows)
    assert command("trace", folder, "--document", rows[0]["document"]) == 0
    assert "step         3  sample 16" in capsys.readouterr().out.splitlines()
    assert command("export", folder, tmp_path / "out") == 0
    assert (tmp_path / "out" / "bessemer.json").exists()
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "mine.txt").write_text("x")
    assert command("export", folder, tmp_path / "busy") == 2
    assert (tmp_path / "busy" / "mine.txt").read_text() == "x"
    assert command("generate", folder, "def ", "--max-tokens", "0") == 2


@pytest.mark.parametrize("average", [(), ("--average", "2")])
def test_an_export_larger_than_memory_is_streamed_and_equal(
    average: tuple[str, ...], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from safetensors.numpy import load_file

    from bessemer.export import export_run

    assert command("export", whole / "small", tmp_path / "whole", *average) == 0
    monkeypatch.setattr(export_run, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(export_run, "open_trained", None)  # the model is not created
    assert command("export", whole / "small", tmp_path / "streamed", *average) == 0
    assert "tensors in" in capsys.readouterr().err
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "streamed"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert ("the mean of the 2 newest checkpoints" in card) == ("Not evaluated" in card) == bool(average), card
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "streamed" / name).read_bytes()


def test_a_closed_output_pipe_is_no_failure(whole: Path) -> None:
    command = (
        f"'{sys.executable}' -m bessemer trace '{whole / 'small'}' --step 2 --json | head -1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_stopped_by_the_guard_has_a_report(prepared: Path, tmp_path: Path) -> None:
    keys = ("optimizer.kind=lion", "optimizer.learning_rate=0.9", "steps=60")
    sets = [part for key in keys for part in ("--set", f"train.{key}")]
    done = bessemer("run", prepared / "small.toml", "--set", f"run.dir={tmp_path / 'runs'}", *sets)
    assert done.returncode == 1 and "so the run stops" in done.stderr
    assert "run stopped" in (tmp_path / "runs" / "small" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("run", "text", "--mintes", "1"), "--set train.minutes=VALUE"),
        (("run", "text", "--lr", "1"), "--set train.optimizer.learning_rate=VALUE"),
        (("trian", "text"), "'trian'; did you mean train?"),
        (("plan", "text", "--price", "2", "--price=3"), "--price: it is given twice, as 2 and 3"),
        (("launch", "text", "--on", "slrum"), "'slrum'; did you mean slurm?"),
        (("generate", "text", "--temperature", "nan"), "--temperature"),
        (("generate", "text", "--seed", str(2**64)), "--seed"),
        (("generate", "text", "--top-k", "1" * 400), "--top-k"),
    ],
)
def test_a_wrong_or_repeated_option_is_an_error_with_advice(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(arguments)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err
