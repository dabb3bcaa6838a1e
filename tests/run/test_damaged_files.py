"""Damaged files of a trained run: repaired if possible, otherwise an error before anything changes."""

import contextlib
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.recipe import dump, load
from bessemer.run.files import read_json, read_json_lines
from tests.changed_stage import record_again
from tests.newest import weights_hash

LONGER = ("--set", "train.steps=30")
CHANGES_ANYHOW = {".lock", "stages.json", "log.txt"}


@pytest.fixture(scope="module")
def made(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of 24 steps and its report, and a copy of it in `kept`."""
    runs = tmp_path_factory.mktemp("damaged") / "runs"
    shutil.copytree(prepared / "runs", runs)
    given = "--set", f"run.dir={runs}", "--set", "train.schedule.kind=constant"
    assert run_command(["train", str(prepared / "small.toml"), *given]) == 0
    assert run_command(["report", str(runs / "small")]) == 0
    shutil.copytree(runs, runs.with_name("kept"))
    return runs


@pytest.fixture
def trained(made: Path, fixed_step_time: None) -> Path:
    """A writable run of 24 steps with a report."""
    shutil.rmtree(made)
    shutil.copytree(made.with_name("kept"), made)
    return made / "small"


def files(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name not in CHANGES_ANYHOW}


def edit(path: Path) -> None:
    """Change one byte in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def train(folder: Path, *more: str, command: str = "train") -> int:
    return run_command([command, str(folder), *more])


@pytest.mark.parametrize("damage", [edit, Path.unlink])
@pytest.mark.fault(25)
def test_damaged_shards_are_named_and_rewritten(trained: Path, damage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before, manifest = files(trained), read_json(trained / "tokens" / "manifest.json")
    shard = trained / "tokens" / "code-train-00000.bin"
    content = shard.read_bytes()
    damage(shard)
    damaged = files(trained)
    capsys.readouterr()
    assert train(trained, *LONGER) == 2
    said = capsys.readouterr().err
    assert str(shard) in said and f"write it again with `bessemer tokens {trained}`" in said
    assert files(trained) == damaged, "a refusal moves nothing"
    assert train(trained, command="tokens") == 0
    assert "skipped" not in capsys.readouterr().err
    assert (
        shard.read_bytes() == content and read_json(trained / "tokens" / "manifest.json")["files"] == manifest["files"]
    )
    timed = dict.fromkeys(("tokens/manifest.json", "tokens/stage.json"), b"")  # seconds, and the length of that file
    assert {**files(trained), **timed} == {**before, **timed}
    assert train(trained, command="tokens") == 0
    assert "tokens    unchanged, skipped" in capsys.readouterr().err
    assert train(trained, *LONGER) == 0


def test_tokens_that_would_differ_are_not_written(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documents changed as well, so that the tokens that a checkpoint was trained on cannot be rebuilt."""
    documents = next((trained / "corpus" / "documents").glob("*.parquet"))
    import pyarrow.parquet as parquet

    table = parquet.read_table(documents)
    parquet.write_table(table.slice(0, len(table) - 1), documents)
    record_again(trained / "corpus")
    edit(trained / "tokens" / "code-train-00000.bin")
    before = files(trained)
    assert train(trained, command="tokens") == 1
    assert "run.name" in capsys.readouterr().err
    assert {name: text for name, text in files(trained).items() if not name.startswith("tokens.work")} == before


def test_a_truncated_journal_is_an_error_before_anything_is_moved(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bessemer.checkpoint.format import MANIFEST, _signed

    path = trained / "checkpoints" / "step-00000024" / MANIFEST
    manifest = read_json(path)
    manifest["facts"]["guard"]["num_rollbacks"] = 1
    path.write_text(json.dumps(_signed({key: manifest[key] for key in manifest if key != "sha256"})))
    before = files(trained)
    assert train(trained, *LONGER) == 2
    assert "journal.jsonl: lines are missing" in capsys.readouterr().err
    assert files(trained) == before


def test_a_finished_run_verifies_its_last_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, weights = trained / "checkpoints", weights_hash(trained)
    (checkpoints / "latest").write_text("step-00000008")
    assert train(trained) == 0
    said = capsys.readouterr().err
    assert "latest: did not name step-00000024" in said and "24 steps are done" in said
    assert (checkpoints / "latest").read_text() == "step-00000024"
    truncate(checkpoints / "step-00000024" / "model.safetensors")
    assert train(trained) == 0
    said = capsys.readouterr().err
    assert "from step 16" in said
    assert weights_hash(trained) == weights
    for path in checkpoints.glob("step-*/model.safetensors"):
        truncate(path)
    assert train(trained) == 2
    said = capsys.readouterr().err
    assert "restore one from a backup" in said and "train longer" not in said
    assert str(checkpoints / "step-00000024" / "model.safetensors") in said.splitlines()[-1], (
        "the reason, for the newest"
    )


def test_a_damaged_checkpoint_is_an_incident_when_a_run_is_extended(trained: Path) -> None:
    truncate(trained / "checkpoints" / "step-00000024" / "model.safetensors")
    assert train(trained, *LONGER) == 0
    (row,) = (row for row in read_json_lines(trained / "incidents.jsonl") if row["what"] == "checkpoint_damaged")
    assert (
        row["step"] == 24
        and "model.safetensors" in row["cause"]
        and row["action"] == "trying the next older checkpoint"
    )


def test_damaged_plans_and_stages_are_rebuilt(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.json", "stages.json", "environment.json"):
        (trained / name).write_text("")
    assert train(trained) == 0
    said = capsys.readouterr().err
    assert all(f"{name}: damaged, not JSON" in said for name in ("plan.json", "stages.json"))
    assert "memory_bytes" in read_json(trained / "plan.json") and read_json(trained / "stages.json")["stages"]
    (trained / "plan.json").write_text("[]")
    assert train(trained) == 0
    assert "plan.json: damaged, not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("stages.json", '{"stages": 3}'),
        ("basis.json", '{"steps": "x"}'),
        ("metrics.jsonl", "[1]\n"),
        ("tokens/stage.json", "[3]"),
    ],
)
def test_json_of_another_structure_is_damage(trained: Path, name: str, content: str) -> None:
    (trained / name).unlink(missing_ok=True)
    (trained / name).write_text(content)
    assert train(trained, *LONGER) == 0
    assert len(read_json_lines(trained / "metrics.jsonl")) >= 6


def test_a_damaged_recipe_of_a_run_is_an_error_with_advice(
    trained: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "recipe.toml").write_text('[run]\nname = "sm')
    given = ["train", str(recipe_file), "--set", f"run.dir={trained.parent}"]
    assert run_command(given) == 2
    said = capsys.readouterr().err
    assert str(trained / "recipe.toml") in said and "--restart" in said
    assert run_command([*given, "--restart"]) == 0


def test_checkpoints_of_another_run_are_errors(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Include checkpoints of another recipe: a renamed run keeps its own (tests/workflow/test_changed_sources.py)."""
    other = load(trained).changed(run={"name": "other", "seed": 9})
    (trained / "recipe.toml").write_text(dump(other))
    before = files(trained)
    assert train(trained, *LONGER) == 2
    assert "was saved by run 'small'" in capsys.readouterr().err and files(trained) == before


@pytest.mark.parametrize("way", ["edited", "gone"])
def test_a_manually_edited_recipe_of_a_run_is_an_error(
    trained: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    shutil.rmtree(trained / "checkpoints" / "step-00000024")  # 16 steps are done
    recipe, given = trained / "recipe.toml", [str(trained)]
    rate = next(line for line in recipe.read_text().splitlines() if line.startswith("learning_rate = "))
    if way == "edited":
        recipe.write_text(recipe.read_text().replace(rate, "learning_rate = 0.02"))
    else:
        recipe.unlink()
        keys = f"run.dir={trained.parent}", "train.schedule.kind=constant", "train.optimizer.learning_rate=0.02"
        given = [str(recipe_file), *(part for key in keys for part in ("--set", key))]
    before = files(trained)
    for command in ("train", "check"):
        assert run_command([command, *given]) == 2
        said = capsys.readouterr().err
        assert f"another recipe (train.optimizer.learning_rate: {rate.partition(' = ')[2]} -> 0.02)" in said, command
    assert files(trained) == before


def test_commands_on_a_run_reject_an_edited_recipe(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = trained / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("seed = ", "seed = 7", 1))
    capsys.readouterr()
    for command in (("trace", "--step", "3"), ("evaluate",)):
        assert run_command([command[0], str(trained), *command[1:]]) == 2, command
        said = capsys.readouterr()
        assert "(run.seed: " in said.err and not said.out


def test_lines_of_logs_with_a_damaged_key_are_left_out(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(trained / "checkpoints" / "step-00000024")
    lines = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    damage = (
        ('"step": ', '"stex": '), ('"grad_norm": ', '"grad_norx": '), ('"loss": ', '"losx": '), ('"step": 1', '"step": "x", "y": 1'),
    )  # fmt: skip
    places = [n for n, line in enumerate(lines) if '"kind": "train", "step": 1' in line and '"step": 1,' not in line]
    for place, (old, new) in zip(places, damage, strict=False):
        assert old in lines[place]
        lines[place] = lines[place].replace(old, new, 1)
    (trained / "metrics.jsonl").write_text("".join(lines))
    (trained / "incidents.jsonl").write_text('{"stfp": 5, "what": "spike", "cause": "a", "action": "b", "onset": 5}\n')
    for command in (("trace", "--step", "6", "--replay"), ("report",), ("train",)):
        assert run_command([command[0], str(trained), *command[1:]]) in (0, 1), command
        assert "Traceback" not in capsys.readouterr().err
    assert read_json(trained / "mixture.json")["samples"] == 24 * 8, "it was trained to its end"


def test_evaluate_and_export_use_the_newest_checkpoint_or_fail(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older checkpoint with the score of another step is never used."""
    newest = sorted((trained / "checkpoints").glob("step-*"))[-1]
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    export = ["export", str(trained), str(trained.parent / "out")]
    for command in (export, ["evaluate", str(trained)]):
        assert run_command(command) == 2
        said = capsys.readouterr().err
        assert f"remove {newest}" in said
    assert not (trained.parent / "out").exists()
    shutil.rmtree(newest)
    assert run_command(["train", str(trained)]) == 0
    assert newest.is_dir() and run_command(export) == 0


def swap_two_ids(tokens: Path) -> Path:
    """Swap the ids of two tokens of the same length, so that the file keeps its size."""
    path = tokens / "tokenizer.json"
    text = path.read_text()
    ids = read_json(path)["model"]["vocab"]
    first, other = [token for token, number in ids.items() if len(token) == 1 and 100 <= number < 256][:2]
    swapped = {
        f'"{first}": {ids[first]}': f'"{first}": {ids[other]}',
        f'"{other}": {ids[other]}': f'"{other}": {ids[first]}',
    }
    for before, after in swapped.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text)
    return path


def name_another_end_of_text(tokens: Path) -> Path:
    path = tokens / "manifest.json"
    manifest = read_json(path)
    path.write_text(json.dumps(manifest | {"tokenizer": manifest["tokenizer"] | {"end_of_text": 7}}))
    return path


@pytest.mark.parametrize("damage", [swap_two_ids, name_another_end_of_text])
def test_no_command_reads_changed_tokens(
    trained: Path, damage: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = files(trained), trained.parent / "out"
    path = damage(trained / "tokens")
    damaged = files(trained)
    assert damaged != whole
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    for command in (
        ["evaluate", str(trained)],
        ["export", str(trained), str(out)],
        ["generate", str(trained), "def "],
        ["chat", str(trained), "--template", "plain"],
        ["train", str(trained), *LONGER],
        ["trace", str(trained), "--step", "1"],
    ):
        capsys.readouterr()
        assert run_command(command) == 2, command
        said = capsys.readouterr().err
        assert str(path) in said and f"`bessemer tokens {trained}`" in said, command
        assert files(trained) == damaged and not out.exists()
    assert run_command(["tokens", str(trained)]) == 0
    timed = dict.fromkeys(("tokens/manifest.json", "tokens/stage.json"), b"")
    assert {**files(trained), **timed} == {**whole, **timed}
    assert run_command(["generate", str(trained), "def "]) == 0


def test_a_damaged_document_is_not_trained_on(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bessemer tokens` names it; `bessemer run` builds the corpus again with equal tokens."""
    timed = ("tokens/manifest.json", "tokens/stage.json")

    def made() -> dict[str, bytes]:
        return {
            name: raw
            for name, raw in files(trained).items()
            if name.startswith(("corpus/documents", "tokens")) and name not in timed
        }

    whole, name = made(), "documents/part-00001.parquet"
    shutil.rmtree(trained / "tokens")
    edit(trained / "corpus" / name)
    assert run_command(["tokens", str(trained)]) == 2
    said = capsys.readouterr().err
    assert str(trained / "corpus" / name) in said and f"`bessemer corpus {trained}`" in said
    assert not (trained / "tokens").exists()
    assert run_command(["run", str(trained), "--set", "export.hf=false"]) == 0
    assert made() == whole


def test_a_damaged_corpus_is_rebuilt(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens built from it stay current."""
    name = "sources.json"
    whole = (trained / "corpus" / name).read_bytes()
    edit(trained / "corpus" / name)
    assert run_command(["corpus", str(trained)]) == 0
    assert str(trained / "corpus" / name) in capsys.readouterr().err
    assert (trained / "corpus" / name).read_bytes() == whole
    for command in ("corpus", "tokens"):
        capsys.readouterr()
        assert run_command([command, str(trained)]) == 0
        assert "unchanged, skipped" in capsys.readouterr().err


def test_damaged_pages_are_detected_without_a_file_hash(trained: Path) -> None:
    """Every bit of the pages of documents in a store, or read by tasks, has a checksum."""
    from bessemer.common.errors import DamagedFile
    from bessemer.tokens.documents import part_files, read_documents

    (trained / "corpus" / "stage.json").unlink()
    part = trained / "corpus" / "documents" / "part-00000.parquet"
    whole, content = list(read_documents(part_files(part.parent))), part.read_bytes()
    draw = random.Random(0)
    for _ in range(40):
        raw = bytearray(content)
        raw[draw.randrange(len(raw) * 3 // 4)] ^= 1 << draw.randrange(8)
        part.write_bytes(raw)
        with contextlib.suppress(DamagedFile):
            assert list(read_documents(part_files(part.parent))) == whole
    part.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(DamagedFile, match=str(part)):
        list(read_documents(part_files(part.parent)))


def test_a_damaged_export_is_rewritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = trained.parent / "out"
    command = ["export", str(trained), str(out)]
    assert run_command(command) == 0
    whole = files(out)
    for damage in (lambda: edit(out / "model.safetensors"), lambda: (out / "config.json").unlink(), lambda: None):
        damage()
        is_whole = files(out) == whole
        capsys.readouterr()
        assert run_command(command) == 0
        assert ("unchanged, skipped" in capsys.readouterr().err) == is_whole
        assert files(out) == whole
    (out / "notes.txt").write_text("mine")
    assert run_command(command) == 0 and (out / "notes.txt").exists(), "a file of the user's is no damage"


def test_every_flipped_bit_of_a_stage_is_detected_or_harmless(trained: Path) -> None:
    """Flip 60 single bits over all files of corpus and tokens: verification finds them, or the same content is read."""
    from bessemer.common.errors import BessemerError
    from bessemer.run.files import STAGE_FILE, verify_stage
    from bessemer.tokens.documents import part_files, read_documents
    from bessemer.tokens.shards import TokenStore

    def read() -> list[Any]:
        store = TokenStore.open(trained / "tokens")
        store.verify()
        verify_stage(trained / "corpus", "bessemer corpus")
        shards = [
            shard
            for name in store.sources
            for split in ("train", "heldout")
            for shard in store.split(name, split).shards
        ]
        arrays = [part.tobytes() for shard in shards for part in (shard.tokens, shard.offsets, shard.identities)]
        kept = {name: content for name, content in files(trained).items() if not name.endswith(STAGE_FILE)}
        return [store.manifest, arrays, list(read_documents(part_files(trained / "corpus" / "documents"))), kept]

    whole, draw, found = read(), random.Random(1), 0
    paths = [path for stage in ("corpus", "tokens") for path in sorted((trained / stage).rglob("*")) if path.is_file()]
    for number in range(60):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        raw = bytearray(content)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        try:
            assert read() == whole, path
            assert path.name == STAGE_FILE
        except BessemerError:
            found += 1
        path.write_bytes(content)
    assert found >= 50 and read() == whole
