"""Exports in ordinary use: `transformers` with default arguments equals our own commands, starting from text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.common.errors import BessemerError
from bessemer.export import hugging_face as files
from bessemer.export.hugging_face import ExportFiles, export
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer
from bessemer.recipe import Train
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.patterns import NORMALIZERS, pattern_of
from bessemer.train.generation import Sampling, complete
from bessemer.train.task import ClassifyTask
from tests.conftest import WORDS
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
END, MASK = "<|endoftext|>", "<|mask|>"
LENGTH = 24
PROMPTS = ["The time is", "They", "what its about than into them can only"]
# Longer than the model reads, empty, and other lengths.
TEXTS = ["", "a", *(" ".join(WORDS[start : start + 3 * start]) for start in range(1, 12)), "naïve Straße 東京"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {"window": 16},
    "olmo2": {"head_dim": 8},
    "gpt2": {"kv_heads": 4, "head_dim": 8},
    "bert": {"kv_heads": 4, "head_dim": 8},
    "modernbert": {"kv_heads": 4, "head_dim": 8, "window": 8},
}
DECODERS = ["qwen3", "llama", "qwen2", "mistral", "olmo2", "gpt2"]


@pytest.fixture(scope="module")
def gpt4_tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS) * 20, Path(__file__).read_text()], 340, END, MASK)


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, gpt4_tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for the model's family: transformers' Qwen2 splits and normalises text in its own way."""
    if "family" not in request.fixturenames or request.getfixturevalue("family") != "qwen2":
        return gpt4_tokenizer
    texts = [" ".join(WORDS) * 20, Path(__file__).read_text()]
    return Tokenizer.train(texts, 340, END, MASK, regex=pattern_of("qwen2"), normalizer=NORMALIZERS["qwen2"])


def exported(family: str, tokenizer: Tokenizer, folder: Path, **changes: Any) -> tuple[Transformer, Path]:
    """A model of random weights and its export."""
    wanted = {**FAMILIES[family].options, **MODELS[family], "vocabulary": 340, "sequence_length": LENGTH, **changes}
    model = stirred(config(**wanted))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    sample = torch.randint(2, 340, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    texts = [(text, tokenizer.encode(text)) for text in TEXTS[1:]]
    labels = tuple(f"class {number}" for number in range(model.config.labels))
    encoder = not model.config.causal
    mask_token = tokenizer.mask_token if encoder else None
    beside = ExportFiles(folder / "tokenizer.json", tokenizer.end_of_text, mask_token=mask_token, labels=labels)
    export(model, beside, folder / "out", sample, texts)
    return model.eval(), folder / "out"


# Texts on which a class of transformers may differ from tokenizer.json; the export check uses none of them.
ODD_TEXTS = [
    "In 1984 and 2024, 365 days of 86400 seconds", "e\u0301te\u0301 and \u1100\u1161", "tab\there  two\u3000wide ", "one\r\n\r\ntwo",
    "🐈‍⬛ and 🇫🇷", "عربي 42", "\u0007\U0002a6a5\ufffd", "x" * 90, f"a{END}b {MASK}",
]  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_export_gives_the_ids_of_its_training_or_fails(family: str, tmp_path: Path) -> None:
    """The held-out texts have neither digits nor decomposed characters; the vocabulary has merges of both."""
    numbers = " ".join(f"{year} e\u0301te\u0301" for year in range(1950, 2030))
    made = Tokenizer.train([" ".join(WORDS) * 5, numbers * 20], 400, END, MASK)
    (tmp_path / "tokenizer.json").write_text(made.to_json())
    options = {**FAMILIES[family].options, **next(iter(FAMILIES[family].examples.values()))}
    model = stirred(config(**{**options, "vocabulary": 400, "sequence_length": LENGTH, "family": family}))
    sample = torch.randint(2, 400, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    beside = ExportFiles(tmp_path / "tokenizer.json", made.end_of_text, mask_token=made.mask_token)
    texts = [(text, made.encode(text)) for text in PROMPTS]
    try:
        check = export(model, beside, tmp_path / "out", sample, texts)
    except BessemerError:
        assert family == "qwen2" and not (tmp_path / "out").exists()
        return
    assert family != "qwen2" and check.tokenizer_documents_equal > len(texts) + len(ODD_TEXTS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ODD_TEXTS:
        assert theirs(text, split_special_tokens=True)["input_ids"] == [made.end_of_text, *made.encode(text)], text
    assert theirs(ODD_TEXTS[-1])["input_ids"][1:] == made.encode_marked(ODD_TEXTS[-1])


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_text_of_an_export_equals_that_of_generate(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, folder = exported(family, tokenizer, tmp_path, sequence_length=64)
    ours = [complete(model, tokenizer, prompt, 8, Sampling()) for prompt in PROMPTS]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, wanted in zip(PROMPTS, ours, strict=True):
        ids = read(prompt, return_tensors="pt")
        out = loaded.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert read.decode(out, skip_special_tokens=True) == wanted
    pipe = transformers.pipeline("text-generation", model=str(folder))
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    assert [row[0]["generated_text"] for row in pipe(PROMPTS, **options)] == ours
    # Prompts of unequal length in one batch, padded on the left so that each row ends with its prompt.
    assert [row[0]["generated_text"] for row in pipe(PROMPTS, batch_size=3, **options)] == ours


@pytest.mark.parametrize("family", list(MODELS))
def test_classes_of_an_export_equal_those_of_evaluate(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder = family in ("bert", "modernbert")
    model, folder = exported(family, tokenizer, tmp_path, labels=5, pooling="first" if encoder else "last")
    rows = torch.full((len(TEXTS), LENGTH), tokenizer.end_of_text)
    for row, text in zip(rows, TEXTS, strict=True):
        ids = tokenizer.encode(text)[: LENGTH - 1]
        row[1 : 1 + len(ids)] = torch.tensor(ids)
    task = ClassifyTask(Train(), tokenizer.end_of_text)
    with torch.no_grad():
        hidden = model(rows, task.documents(rows))
        wanted = model.classifier(hidden, task._lengths(rows)).softmax(1)
    pipe = transformers.pipeline("text-classification", model=str(folder), truncation=True, top_k=None)
    for found in (pipe(TEXTS), pipe(TEXTS, batch_size=len(TEXTS))):
        scores = [{row["label"]: row["score"] for row in rows} for rows in found]
        for row, probabilities in zip(scores, wanted.tolist(), strict=True):
            assert [row[f"class {number}"] for number in range(5)] == pytest.approx(probabilities, abs=1e-6)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_hidden_words_of_an_export_are_filled_in_as_by_generate(
    family: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, folder = exported(family, tokenizer, tmp_path)
    text = f"They had {MASK} of"
    ids = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode_marked(text)]])
    with torch.no_grad():
        logits = model.logits(ids)[0, ids[0].tolist().index(tokenizer.mask_token or -1)]
    best = logits.softmax(0).topk(5)
    found = transformers.pipeline("fill-mask", model=str(folder))(text)
    assert [row["token"] for row in found] == best.indices.tolist()
    assert [row["score"] for row in found] == pytest.approx(best.values.tolist(), abs=1e-6)


# Metrics by output type; rolling texts, few-shot examples, and contexts that are empty, end in white space or are too long.
TASKS = {
    "choice": ("multiple_choice", "{{question}}", "{{answer}}", "num_fewshot: 2\ndoc_to_choice: '{{choices}}'", ("acc", "acc_norm")),
    "cloze": ("loglikelihood", "{{question}}", "{{choices[0]}}", "target_delimiter: ''", ("acc", "perplexity")),
    "text": ("loglikelihood_rolling", "", "{{long}}", "", ("bits_per_byte", "word_perplexity")),
    "writes": ("generate_until", "{{question}}", "{{choices[0]}}", "generation_kwargs: {max_gen_toks: 6, until: ['e']}", ("exact_match",)),
}  # fmt: skip


def test_task_scores_equal_those_of_the_evaluation_harness_on_the_export(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every log-likelihood, answer and score equals that of lm-evaluation-harness on the exported model, in fp32."""
    pytest.importorskip("accelerate", reason="the extra tasks is not installed")
    pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from bessemer.evaluate.harness import score_task
    from bessemer.evaluate.task_files import open_tasks
    from bessemer.train.setup import ScoredModel

    model, folder = exported("llama", tokenizer, tmp_path, sequence_length=96)
    rows: list[dict[str, Any]] = [
        {
            "question": " ".join(WORDS[n : n + 5]) + " " * (n % 3), "answer": n % 2, "long": " ".join(WORDS * (1 + n % 4))[n:],
            "choices": [f" {WORDS[n + 7]}", f" {WORDS[n + 9]} {WORDS[n]}"],
        }
        for n in range(12)
    ]  # fmt: skip
    rows[3]["question"], rows[5]["question"] = "", " ".join(WORDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, text, target, more, metrics) in TASKS.items():
        listed = "".join(f"\n  - metric: {metric}" for metric in metrics)
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}}}\ntest_split: test\n"
            f"output_type: {kind}\ndoc_to_text: '{text}'\ndoc_to_target: '{target}'\nmetric_list:{listed}\n{more}\n"
        )
    subject = ScoredModel(model, tokenizer, Framing((tokenizer.end_of_text,), ()), (tokenizer.end_of_text,))
    tasks = open_tasks(str(tmp_path / f"{name}.yaml") for name in TASKS)
    assert [task.name for task in tasks] == list(TASKS)
    for task in tasks:
        scored, ours = score_task(task, subject)
        # The harness puts its first token before a whole text, even if the tokenizer has already done so.
        harness = HFLM(pretrained=str(folder), device="cpu", batch_size=4, add_bos_token=task.name != "text")
        task.task.set_fewshot_seed(1234)
        found = evaluate(harness, {"tasks": {task.name: task.task}}, bootstrap_iters=0)
        theirs = found["samples"][task.name]
        assert len(ours) == len(theirs) == 12
        for row, other in zip(ours, theirs, strict=True):
            if task.name == "writes":
                assert row["resps"] == other["resps"]
            elif task.name == "text":
                assert row["resps"][0][0] == pytest.approx(other["resps"][0][0], abs=1e-3)  # of hundreds of tokens
            else:
                for (mine,), (one,) in zip(row["resps"], other["resps"], strict=True):
                    assert mine[0] == pytest.approx(one[0], abs=1e-5) and mine[1] == one[1]
        assert (scored["cut"] > 0) == (task.name in ("choice", "cloze"))
        for metric in TASKS[task.name][4]:
            assert scored["scores"][metric]["value"] == pytest.approx(
                found["results"][task.name][f"{metric},none"], rel=1e-6
            )


def test_the_export_check_detects_exports_that_are_wrong_on_text(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these exports has equal logits on equal ids, but is wrong in use."""
    written = files.write_json
    spoiled: dict[str, Any] = {}

    def spoil(path: Path, value: Any) -> None:
        written(path, {**value, **spoiled.get(path.name, {})})

    monkeypatch.setattr(files, "write_json", spoil)
    spoiled = {"tokenizer.json": {"post_processor": None}, "tokenizer_config.json": {"add_bos_token": False}}
    with pytest.raises(BessemerError, match=r"at position 0, here \[0, \d+"):
        exported("qwen3", tokenizer, tmp_path)
    spoiled = {"tokenizer_config.json": {"padding_side": "left"}}
    with pytest.raises(BessemerError, match="scores of a batch"):
        exported("bert", tokenizer, tmp_path, labels=3, pooling="first")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
