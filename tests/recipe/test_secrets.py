"""Webhook URLs and credentials in URLs reach no file, tracker, cluster manifest or error message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.common.errors import BessemerError, InputError, redact
from bessemer.guard.alerts import post_incidents
from bessemer.recipe import dump, load
from bessemer.recipe.secrets import shareable
from bessemer.run.directory import RunDirectory

SECRET = "B0-hidden-wJalrXUtnFEMI"


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_webhook_url_stays_in_the_environment(
    runs: Path, recipe_file: Path, inbox: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    url, posts = inbox
    logged: list[Any] = []
    wandb = SimpleNamespace(
        init=lambda **options: [logged.append(options)] and SimpleNamespace(
            define_metric=lambda *given, **named: None, log=lambda row: None, finish=lambda: None))  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    monkeypatch.setenv("ALERTS_URL", f"{url}/{SECRET}")
    sets = [
        f"run.dir={runs}",
        "train.steps=4",
        "report.webhook=ALERTS_URL",
        'report.trackers=["wandb"]',
        "export.hf=false",
    ]
    given = [part for one in sets for part in ("--set", one)]
    assert run_command(["run", str(recipe_file), *given]) == 0
    assert [post["what"] for post in posts] == ["finished"]
    assert logged[0]["config"]["report"]["webhook"] == "ALERTS_URL"
    manifests = list((runs / "small" / "checkpoints").glob("*/manifest.json"))
    assert manifests and all("ALERTS_URL" in path.read_text() for path in manifests)
    assert SECRET.encode() not in all_bytes(runs) and SECRET not in json.dumps(logged, default=str)
    cluster = ["cluster.image=i:1", "cluster.nodes=1", 'cluster.mounts=["c:/data"]']
    for on in ("kubernetes", "slurm"):
        more = [part for one in cluster for part in ("--set", one)]
        assert run_command(["launch", str(recipe_file), *given, *more, "--on", on, "--out", str(tmp_path / on)]) == 0
        assert b"ALERTS_URL" in all_bytes(tmp_path / on) and SECRET.encode() not in all_bytes(tmp_path / on)
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("value", [None, "not a url", f"ftp://{SECRET}"])
def test_a_variable_without_a_url_is_rejected_before_the_training(
    value: str | None, runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.delenv("ALERTS_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("ALERTS_URL", value)
    given = ["--set", f"run.dir={runs}", "--set", "report.webhook=ALERTS_URL"]
    assert run_command(["train", str(recipe_file), *given]) == 2
    said = capsys.readouterr().err
    assert "ALERTS_URL" in said and SECRET not in said
    assert not (runs / "small" / "metrics.jsonl").exists()


REFUSED = (
    f'report.webhook="https://hooks.example.com/services/{SECRET}"',
    f'report.web_hook="https://hooks.example.com/services/{SECRET}"',
    f'checkpoint.mirror="s3://key:{SECRET}@bucket/runs"',
    f'checkpoint.mirror="s3://key:a/{SECRET}+x@bucket/runs"',
    f'checkpoint.mirror="https://user:{SECRET}@host/runs"',
    f'checkpoint.mirror="s3://bucket/x?X-Amz-Signature={SECRET}"',
    f'corpus.sources.prose.paths=["s3://key:a/{SECRET}@bucket/*.jsonl"]',
    f'corpus.sources.prose.paths=["s3://bucket/x?AWSAccessKeyId=AK&Signature={SECRET}"]',
    f'corpus.sources.prose.endpoint="http://user:{SECRET}@host:9000"',
    f'tokenizer.path="https://user:{SECRET}@host/tokenizer.json"',
    f'evaluate.tasks=["s3://key:{SECRET}@bucket/x.yaml"]',
    f'train.start="s3://key:{SECRET}@bucket/run"',
)


@pytest.mark.parametrize("override", REFUSED)
@pytest.mark.parametrize("is_in_file", [False, True])
def test_rejected_secrets_are_not_echoed(
    override: str, is_in_file: bool, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", f"run.dir={tmp_path / 'runs'}"]
    path = tmp_path / "my.toml"
    text = (prepared / "small.toml").read_text()
    if is_in_file and not override.startswith(("corpus.sources", "tokenizer.")):
        key, _, value = override.partition("=")
        table, _, last = key.rpartition(".")
        header = f"[{table}]\n"
        text = (
            text.replace(header, f"{header}{last} = {value}\n")
            if header in text
            else f"{text}\n{header}{last} = {value}\n"
        )
    else:
        sets += ["--set", override]
    path.write_text(text)
    for command in (["run", str(path)], ["launch", str(path), "--on", "slurm", "--out", str(tmp_path / "launch")]):
        assert run_command([*command, *sets]) == 2
        assert run_command([*command, *sets, "--json"]) == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    path.unlink()
    assert SECRET.encode() not in all_bytes(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["run", f"s3://key:{SECRET}@bucket/run"],
        ["report", f"gs://key:{SECRET}@bucket/run"],
        ["report", "runs/x", f"s3://key:{SECRET}@bucket/run", "--nothing", f"s3://key:{SECRET}@bucket/run"],
    ],
)
def test_rejected_arguments_are_not_echoed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:  # errors of argparse, or with the command's exit code
        sys.exit(run_command(words))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err


def test_values_that_are_not_secret_stay_in_errors() -> None:
    for text in (
        "s3://bucket/a@b.txt: no such file", "http://127.0.0.1:9000/a@b", "write to me@example.org: at 12:30@noon",
        "s3://bucket/part-?.jsonl", "hf:org/name@main", "localhost:29500", "C:/x, y@z",
    ):  # fmt: skip
        assert redact(text) == text.replace("12:30@noon", "***@noon")
    assert str(InputError("s3://a:b@c/d")) == "s3://***@c/d" and str(BessemerError("x:y@host.org")) == "***@host.org"


def test_a_shared_recipe_has_no_secrets(recipe_file: Path) -> None:
    """Include a recipe built in Python, without the checks of a file."""
    recipe = load(recipe_file)
    recipe = recipe.changed(report={"webhook": f"https://x/{SECRET}"}, checkpoint={"mirror": f"s3://k:{SECRET}@b/x"})
    values = shareable(recipe)
    assert values["checkpoint"]["mirror"] == "s3://***@b/x" and SECRET not in json.dumps(values) + dump(recipe)
    assert shareable(load(recipe_file))["train"] == json.loads(
        load(recipe_file).train.model_dump_json(exclude_none=True)
    )


@pytest.mark.parametrize(
    "url", [f"http://127.0.0.1:9/{SECRET}", f"http://127.0.0.1:9/a{SECRET} b", f"http://[{SECRET}/x"]
)
def test_an_alert_that_cannot_be_posted_names_no_url(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with post_incidents(RunDirectory(tmp_path), url):
        pass
    said = capsys.readouterr().err
    assert said.count("report.webhook") == 1 and SECRET not in said
