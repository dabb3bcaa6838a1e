"""Masked language models and classifiers as a user runs them: end to end, killed, and given wrong input."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.commands import bessemer, changed, command, interrupted, resumed
from tests.conftest import recipe_text, write_text
from tests.newest import training_result

pytest.importorskip("transformers")

ENCODER = 'family = "modernbert"\nwindow = 8\nkv_heads = 2'
LABELLED = (('name = "prose"', 'name = "prose"\nlabel = "prose"'), ('name = "code"', 'name = "code"\nlabel = "code"'))


def masked_recipe(folder: Path) -> str:
    objective = '[train]\nobjective = "masked"'
    return changed(recipe_text(folder), ("kv_heads = 1", ENCODER), ("[train]\n", objective + "\n"), ("= 400", "= 410"))


def classify_recipe(folder: Path, more: str = "") -> str:
    objective = f'[train]\nobjective = "classify"\nstart = "runs/small"\n{more}'
    tokenizer = 'path = "runs/small/tokens/tokenizer.json"'
    return changed(
        recipe_text(folder),
        *LABELLED,
        ('name = "small"', 'name = "classes"'),
        ("kv_heads = 1", ENCODER),
        ("[train]\n", objective + "\n"),
        ("vocabulary = 400", tokenizer),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a masked run, whole, and a classifier trained from it."""
    folder = tmp_path_factory.mktemp("objectives")
    write_text(folder / "text")
    (folder / "masked.toml").write_text(masked_recipe(folder) + "\n[train.masking]\nwhole_words = true\n")
    (folder / "classes.toml").write_text(classify_recipe(folder))
    for name in ("masked", "classes"):
        done = bessemer("run", folder / f"{name}.toml")
        assert done.returncode == 0, done.stderr
    return folder


def test_a_masked_run_has_no_bits_and_fills_words_in(place: Path) -> None:
    folder = place / "runs" / "small"
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert manifest["tokenizer"]["mask_token"] == 1
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert (evaluation["objective"], evaluation["bits_per_byte"], evaluation["ngram"]) == ("masked", None, None)
    assert 0 < evaluation["accuracy"] < 1 and evaluation["samples"] == []
    hidden = manifest["sources"]
    tokens = sum(split["heldout"]["tokens"] - split["heldout"]["documents"] for split in hidden.values())
    assert abs(evaluation["tokens"] - 0.15 * tokens) <= 0.02 * tokens
    for found in evaluation["fill_ins"]:
        assert len(found["word"].encode()) >= 2
        assert len(found["guesses"]) == 3
        shares = [guess["probability"] for guess in found["guesses"]]
        assert 1 >= shares[0] >= shares[1] >= shares[2] >= 0
    losses = [loss for loss, _ in training_result(folder)[2]]
    assert sum(losses[-4:]) < sum(losses[:4])
    page = re.sub(r"<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    assert "encoder" in page and 'id="fill_ins"' in page and "Bits per byte" not in page
    assert json.loads((folder / "export" / "bessemer.json").read_text())["architecture"] == "ModernBertForMaskedLM"
    pipeline = pytest.importorskip("transformers").pipeline("fill-mask", model=str(folder / "export"))
    assert len(pipeline(f"the {pipeline.tokenizer.mask_token} of")) == 5


def test_a_classifier_started_from_it_tells_the_classes_apart(place: Path) -> None:
    folder = place / "runs" / "classes"
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert manifest["labels"] == ["code", "prose"]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["accuracy"] > 0.9  # prose and code are easy
    held_out = {name: split["heldout"]["documents"] for name, split in manifest["sources"].items()}
    assert {row["label"]: row["texts"] for row in evaluation["classes"]} == held_out
    assert [sum(row) for row in evaluation["confusion"]] == [held_out["code"], held_out["prose"]]
    (folder / "evaluation.json").unlink()
    done = bessemer("evaluate", folder)
    often = max(held_out.values()) / sum(held_out.values())
    assert f"always the most frequent class: {often:.1%}" in done.stderr, done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["accuracy"] <= 1 for row in rows if row["kind"] in ("train", "validation"))
    page = re.sub(r"<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    assert "classifier" in page and "<h2>Classes</h2>" in page
    exported = json.loads((folder / "export" / "bessemer.json").read_text())
    assert exported["architecture"] == "ModernBertForSequenceClassification"
    assert json.loads((folder / "export" / "config.json").read_text())["id2label"] == {"0": "code", "1": "prose"}


def test_an_exported_classifier_says_what_evaluate_counted(place: Path) -> None:
    """Every held-out text through `pipeline` with default arguments: the same table of right and wrong."""
    from bessemer.tokens.loader import LabelledTexts
    from bessemer.tokens.shards import TokenStore
    from bessemer.tokens.tokenizer import Tokenizer

    folder = place / "runs" / "classes"
    pipe = pytest.importorskip("transformers").pipeline("text-classification", model=str(folder / "export"))
    store = TokenStore.open(folder / "tokens")
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", "<|endoftext|>")
    confusion = [[0] * len(store.labels) for _ in store.labels]
    for name in store.sources:
        split = store.split(name, "heldout")
        texts = LabelledTexts(split, 1, store.end_of_text)
        rows = [
            split.shards[0].tokens[start : start + size]
            for start, size in zip(texts.starts, texts.lengths, strict=True)
        ]
        found = pipe([tokenizer.decode(row.tolist()) for row in rows], truncation=True, batch_size=8)
        for label, one in zip(texts.labels.tolist(), found, strict=True):
            confusion[label][store.labels.index(one["label"])] += 1
    assert confusion == json.loads((folder / "evaluation.json").read_text())["confusion"]


def test_trace_knows_a_classifiers_texts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "runs" / "classes"
    assert command("trace", folder, "--step", "3", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["sample"] for row in rows] == list(range(16, 24))
    assert command("trace", folder, "--document", rows[0]["document"], "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert (3, rows[0]["sample"]) in {(row["step"], row["sample"]) for row in steps}


def test_who_does_not_write_says_what_it_does(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("generate", place / "runs" / "small", "def ") == 2
    assert "an encoder" in capsys.readouterr().err
    assert command("generate", place / "runs" / "classes", "def ") == 2
    assert "is a classifier and writes no text" in capsys.readouterr().err


def test_a_killed_masked_training_goes_on_bit_for_bit(place: Path, tmp_path: Path) -> None:
    for name in ("corpus", "tokens"):
        shutil.copytree(place / "runs" / "small" / name, tmp_path / "small" / name)
    interrupted(place / "masked.toml", tmp_path, 19, signal.SIGKILL)
    assert resumed(place / "masked.toml", tmp_path) == training_result(place / "runs" / "small")


@pytest.mark.long
def test_a_decoder_is_a_classifier_too(place: Path, tmp_path: Path) -> None:
    """From scratch, on its last token; export included."""
    text = changed(
        recipe_text(place), *LABELLED, ("[train]\n", '[train]\nobjective = "classify"\n'), ('"small"', '"decoder"')
    )
    (place / "decoder.toml").write_text(text + '\n[train.classify]\npooling = "last"\n')
    done = bessemer("run", place / "decoder.toml", "--set", f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    exported = json.loads((tmp_path / "decoder" / "export" / "bessemer.json").read_text())
    assert exported["architecture"] == "Qwen3ForSequenceClassification"


@pytest.mark.parametrize(
    ("recipe", "overrides", "key"),
    [
        ("masked", ["tokenizer.vocabulary=257"], "vocabulary"),
        ("classes", ["tokenizer.mask_token=[MASK]", "train.objective=masked"], "mask_token"),
        ("classes", ["corpus.sources.code.label=prose"], "'prose'"),
        ("classes", ["model.width=64"], "width"),
    ],
)
def test_wrong_input_is_one_line(
    place: Path, tmp_path: Path, recipe: str, overrides: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for value in (f"run.dir={tmp_path}", "run.name=x", *overrides) for part in ("--set", value)]
    assert command("run", place / f"{recipe}.toml", *sets) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    assert len(said) == 1 and key in said[0]
