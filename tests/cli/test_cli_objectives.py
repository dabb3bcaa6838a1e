"""Masked language models and classifiers as a user runs them: end to end, killed, and with wrong input."""

import json
import re
from pathlib import Path

import pytest
import torch

from bessemer.run.files import read_json_lines
from tests.cli.commands import bessemer, changed, command
from tests.conftest import recipe_text, write_conversations, write_text
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
    """A folder with an uninterrupted masked run and a classifier trained from it."""
    folder = tmp_path_factory.mktemp("objectives")
    write_text(folder / "text")
    (folder / "masked.toml").write_text(masked_recipe(folder) + "\n[train.masking]\nwhole_words = true\n")
    (folder / "classes.toml").write_text(classify_recipe(folder))
    for name in ("masked", "classes"):
        done = bessemer("run", folder / f"{name}.toml")
        assert done.returncode == 0, done.stderr
    return folder


def test_a_masked_run_has_no_bits_per_byte_and_its_export_fills_in_words(place: Path) -> None:
    folder = place / "runs" / "small"
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert manifest["tokenizer"]["mask_token"] == 1
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert (evaluation["objective"], evaluation["bits_per_byte"], evaluation["ngram"]) == ("masked", None, None)
    assert 0 < evaluation["accuracy"] < 1 and evaluation["samples"] == []
    hidden = manifest["sources"]
    tokens = sum(split["heldout"]["tokens"] - split["heldout"]["documents"] for split in hidden.values())
    assert abs(evaluation["tokens"] - 0.15 * tokens) <= 0.02 * tokens
    losses = [loss for loss, _ in training_result(folder)[2]]
    assert sum(losses[-4:]) < sum(losses[:4])
    page = re.sub(r"<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    assert "encoder" in page and "Bits per byte" not in page
    assert json.loads((folder / "export" / "bessemer.json").read_text())["architecture"] == "ModernBertForMaskedLM"
    pipeline = pytest.importorskip("transformers").pipeline("fill-mask", model=str(folder / "export"))
    assert len(pipeline(f"the {pipeline.tokenizer.mask_token} of")) == 5


def test_a_classifier_started_from_a_masked_run_separates_the_classes(place: Path) -> None:
    folder = place / "runs" / "classes"
    manifest = json.loads((folder / "tokens" / "manifest.json").read_text())
    assert manifest["labels"] == ["code", "prose"]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["accuracy"] > 0.9  # prose and code are easy to tell apart
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


def test_trace_shows_the_texts_of_a_classifier(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "runs" / "classes"
    assert command("trace", folder, "--step", "3", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["sample"] for row in rows] == list(range(16, 24))
    assert command("trace", folder, "--document", rows[0]["document"], "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert (3, rows[0]["sample"]) in {(row["step"], row["sample"]) for row in steps}


def test_generating_from_a_classifier_or_encoder_is_an_error_with_advice(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("generate", place / "runs" / "small", "def ") == 2
    assert "an encoder" in capsys.readouterr().err
    assert command("generate", place / "runs" / "classes", "def ") == 2
    assert "a classifier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "key"),
    [
        ("masked", ["tokenizer.vocabulary=257"], "vocabulary"),
        ("classes", ["tokenizer.mask_token=[MASK]", "train.objective=masked"], "mask_token"),
        ("classes", ["corpus.sources.code.label=prose"], "'prose'"),
        ("classes", ["model.width=64"], "width"),
    ],
)
def test_wrong_input_gives_a_one_line_error(
    place: Path, tmp_path: Path, recipe: str, overrides: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for value in (f"run.dir={tmp_path}", "run.name=x", *overrides) for part in ("--set", value)]
    assert command("run", place / f"{recipe}.toml", *sets) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    assert len(said) == 1 and key in said[0]


RECIPE = """
run = {{ seed = 3, dir = "{folder}", name = "{name}" }}
tokenizer.vocabulary = 300
tokens = {{ sequence_length = 256, packing = "best-fit", document_mask = true, held_out = 0.2 }}
model = {{ layers = 1, width = 32, heads = 2, family = "llama" }}
[[corpus.sources]]
name = "talk"
format = "chat"
paths = ["{talk}"]
[train]
steps = 12
log_every = 1
global_batch_tokens = 2048
micro_batch = {micro_batch}
device = "cpu"
optimizer.learning_rate = 0.01
"""


def written(folder: Path, name: str, micro_batch: int) -> Path:
    """Write a recipe of conversations and their file."""
    talk = folder / "talk.jsonl"
    if not talk.exists():
        write_conversations(talk)
        with open(talk, "a") as file:
            file.write('{"messages": [{"role": "user", "content": "nobody answers"}]}\n{"messages": "no list"}\n')
    recipe = folder / f"{name}.toml"
    recipe.write_text(RECIPE.format(folder=folder, name=name, talk=talk, micro_batch=micro_batch))
    return recipe


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]


def test_the_loss_of_conversations_covers_the_answers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert command("run", written(tmp_path, "chat", 8)) == 0, capsys.readouterr().err
    run = tmp_path / "chat"
    assert losses(run)[-1] < losses(run)[0]
    assert "bits per byte on the answers of held-out conversations" in (run / "report.html").read_text()
    (talk,) = json.loads((run / "corpus" / "statistics.json").read_text())["sources"]
    assert talk["rejected"]["bad_record"]["documents"] == 2
    # The held-out loss equals that of the assistant's words in transformers, by its own template and mask.
    model, tokenizer = (one.from_pretrained(run / "export") for one in (AutoModelForCausalLM, AutoTokenizer))
    import pyarrow.parquet as parquet

    from bessemer.tokens.documents import is_held_out

    nats, count = 0.0, 0
    for row in parquet.read_table(run / "corpus" / "documents").to_pylist():
        if not is_held_out(row["identity"], 0, 0.2):
            continue
        found = tokenizer.apply_chat_template(
            json.loads(row["text"]), return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor([tokenizer.eos_token_id, *found["input_ids"]])
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, :-1].double()
        for logits_V, target, is_trained in zip(logits_TV, ids[1:], found["assistant_masks"], strict=True):
            if is_trained and int(target) not in tokenizer.all_special_ids and tokenizer.decode(target) != "<|im_end|>":
                nats, count = nats - float(logits_V.log_softmax(-1)[target]), count + 1
    assert json.loads((run / "evaluation.json").read_text())["loss"] == pytest.approx(nats / count, abs=2e-5)
    assert "<|im_end|>" in tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)


def test_conversations_rejected_by_the_template_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, "chat", 8)
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    with open(tmp_path / "talk.jsonl", "a") as file:
        for number in range(3):
            file.write(json.dumps({"messages": [{"role": "user", "content": f"call {number}"}, call]}) + "\n")
        talk = [{"role": "user", "content": "<|im_end|>", "mood": 1}, {"role": "assistant", "content": "No."}]
        file.write(json.dumps({"messages": talk}) + "\n")
        file.write(json.dumps({"messages": talk, "tools": [{"name": "f"}]}) + "\n")
    assert command("corpus", recipe) == 0 and command("tokens", recipe) == 0
    said = capsys.readouterr().err
    assert "4 of 125 conversations" in said
    assert "a message has tool_calls, which the chat template does not write" in said
    manifest = json.loads((tmp_path / "chat" / "tokens" / "manifest.json").read_text())
    assert sorted(manifest["refusals"].values()) == [1, 3]
    assert sum("tools" in reason for reason in manifest["refusals"]) == 1
    assert manifest["special_tokens_in_messages"] == {"<|im_end|>": 1} and manifest["fields_left_out"] == {"mood": 1}
    assert sum(split["documents"] for split in manifest["sources"]["talk"].values()) == 121
    # A template that rejects almost all conversations: nothing is written.
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}{% for m in messages %}{{ m.role }}: "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    capsys.readouterr()
    assert command("tokens", recipe, "--set", f"tokens.chat_template={template}", "--set", "run.name=strict") == 2
    command("corpus", recipe, "--set", "run.name=strict")
    assert command("tokens", recipe, "--set", f"tokens.chat_template={template}", "--set", "run.name=strict") == 2
    said = capsys.readouterr().err
    assert "too long" in said and "tokens.chat_template" in said
    assert not (tmp_path / "strict" / "tokens" / "manifest.json").exists()
