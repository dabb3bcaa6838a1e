"""Conversations from files to an export that answers as it was trained."""

import json
from pathlib import Path

import pytest
import torch

from bessemer.run.files import read_json_lines
from tests.cli.commands import bessemer, command
from tests.conftest import write_conversations

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
    """A recipe of conversations, and their file."""
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


def test_conversations_are_learned_by_their_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert command("run", written(tmp_path, "chat", 8)) == 0, capsys.readouterr().err
    run = tmp_path / "chat"
    assert losses(run)[-1] < losses(run)[0]
    assert "bits per byte on the answers of held-out conversations" in (run / "report.html").read_text()
    (talk,) = json.loads((run / "corpus" / "statistics.json").read_text())["sources"]
    assert talk["rejected"]["bad_record"]["documents"] == 2
    # The held-out loss is that of the assistant's words in transformers, by its own template and mask.
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


@pytest.mark.long
def test_the_loss_of_conversations_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Each micro-batch and rank holds another number of trained tokens."""
    for name, micro_batch, more in (("one", 8, []), ("small", 1, []), ("two", 2, ["--set", "parallel.replicate=2"])):
        done = bessemer("train", written(tmp_path, name, micro_batch), *more)
        if name == "one" or done.returncode:  # the stages before it
            for stage in ("corpus", "tokens", "train"):
                done = bessemer(stage, tmp_path / f"{name}.toml", *more)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_a_check_of_conversations_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", written(tmp_path, "checked", 8)) == 0, capsys.readouterr().out


def test_conversations_that_the_template_refuses_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "4 of 125 conversations left out, as the chat template refuses them" in said
    assert "a message has tool_calls, which the chat template does not write" in said
    manifest = json.loads((tmp_path / "chat" / "tokens" / "manifest.json").read_text())
    assert sorted(manifest["refusals"].values()) == [1, 3]
    assert sum("tools" in reason for reason in manifest["refusals"]) == 1
    assert manifest["special_tokens_in_messages"] == {"<|im_end|>": 1} and manifest["fields_left_out"] == {"mood": 1}
    assert sum(split["documents"] for split in manifest["sources"]["talk"].values()) == 121
    # A template that takes hardly any: nothing is written.
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
    assert "too long" in said and "give a template that takes them by tokens.chat_template" in said
    assert not (tmp_path / "strict" / "tokens" / "manifest.json").exists()
