"""An export in ordinary use: `transformers` with default arguments, from text, does what our own commands do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.errors import BessemerError
from bessemer.model.generation import Sampling, complete
from bessemer.model.huggingface import export as files
from bessemer.model.huggingface.export import ExportFiles, export
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer
from bessemer.recipe import Train
from bessemer.tokens.patterns import NORMALIZERS, pattern_of
from bessemer.tokens.pieces import Framing
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.task import ClassifyTask
from tests.conftest import WORDS
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
END, MASK = "<|endoftext|>", "<|mask|>"
LENGTH = 24
PROMPTS = ["The time is", "They", "what its about than into them can only"]
# Longer than the model reads, empty, and everything between.
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
    """What a model of the test's family can be exported with: transformers' Qwen2 cuts and normalises text in its own way."""
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


@pytest.mark.parametrize("family", list(MODELS))
def test_ids_are_those_the_model_was_trained_on(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    _, folder = exported(family, tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (END, END, END)
    # Saved and loaded again, as a fine-tuning elsewhere does.
    theirs.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("They had")["input_ids"] == theirs("They had")["input_ids"]


# Texts of kinds on which a class of transformers may differ from tokenizer.json, none of them the gate's own.
ODD_TEXTS = [
    "In 1984 and 2024, 365 days of 86400 seconds", "e\u0301te\u0301 and \u1100\u1161", "tab\there  two\u3000wide ", "one\r\n\r\ntwo",
    "🐈‍⬛ and 🇫🇷", "عربي 42", "\u0007\U0002a6a5\ufffd", "x" * 90, f"a{END}b {MASK}",
]  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_export_gives_the_ids_of_its_training_or_is_refused(family: str, tmp_path: Path) -> None:
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
def test_greedy_text_is_that_of_generate(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
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
    # Prompts of unequal length in one batch: padded on the left, so that each row ends with its prompt.
    assert [row[0]["generated_text"] for row in pipe(PROMPTS, batch_size=3, **options)] == ours


@pytest.mark.parametrize("family", list(MODELS))
def test_classes_are_those_of_evaluate(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
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
def test_hidden_words_are_filled_in_as_here(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, folder = exported(family, tokenizer, tmp_path)
    text = f"They had {MASK} of"
    ids = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode_marked(text)]])
    with torch.no_grad():
        logits = model.logits(ids)[0, ids[0].tolist().index(tokenizer.mask_token or -1)]
    best = logits.softmax(0).topk(5)
    found = transformers.pipeline("fill-mask", model=str(folder))(text)
    assert [row["token"] for row in found] == best.indices.tolist()
    assert [row["score"] for row in found] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_the_evaluation_harness_scores_as_our_own_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """lm_eval with default arguments on a task of multiple choice; on whole texts with add_bos_token=False."""
    pytest.importorskip("accelerate", reason="the extra tasks is not installed")
    lm_eval = pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, folder = exported("llama", tokenizer, tmp_path, sequence_length=96)
    questions = [
        {
            "question": " ".join(WORDS[n : n + 5]),
            "choices": [f" {WORDS[n + 7]}", f" {WORDS[n + 9]} {WORDS[n]}"],
            "answer": n % 2,
        }
        for n in range(12)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    task = {
        "task": "local", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=4)
    found = lm_eval.simple_evaluate(model=harness, tasks=[task], log_samples=True, bootstrap_iters=0)

    def score(context: str, text: str) -> float:
        """Log-probability of a text after a context, which begins with end-of-text as in `generate`."""
        before, whole = ([tokenizer.end_of_text, *tokenizer.encode(part)] for part in (context, context + text))
        with torch.no_grad():
            nats = model.logits(torch.tensor([whole]))[0].log_softmax(-1)
        return sum(float(nats[place - 1, whole[place]]) for place in range(len(before), len(whole)))

    right = 0
    for sample in found["samples"]["local"]:
        row = sample["doc"]
        ours = [score(row["question"], choice) for choice in row["choices"]]
        theirs = [float(answer[0][0]) for answer in sample["resps"]]
        assert theirs == pytest.approx(ours, abs=1e-3)
        right += ours.index(max(ours)) == row["answer"]
    assert found["results"]["local"]["acc,none"] == right / len(questions)
    # The harness itself puts the first token before a whole text, also where the tokenizer has done so.
    text = " ".join(WORDS[:12])
    alone = HFLM(pretrained=str(folder), device="cpu", add_bos_token=False)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    assert alone.loglikelihood_rolling([request])[0] == pytest.approx(score("", text), abs=1e-3)


def test_tasks_score_as_the_evaluation_harness(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Multiple choice and cloze, log-likelihoods to 1e-6 a token (both in fp64), and the scores made of them."""
    pytest.importorskip("accelerate", reason="the extra tasks is not installed")
    lm_eval = pytest.importorskip("lm_eval", reason="the extra tasks is not installed")
    from lm_eval.models.huggingface import HFLM

    from bessemer.tasks.files import open_task
    from bessemer.tasks.scoring import ScoredModel, score_task

    model, folder = exported("llama", tokenizer, tmp_path, sequence_length=96)
    rows = [
        {
            "goal": " ".join(WORDS[n : n + 5]), "sol1": f"{WORDS[n + 7]} {WORDS[n]}", "sol2": WORDS[n + 9], "label": n % 2,
            "text": " ".join(WORDS[n : n + 9]),
        }
        for n in range(12)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    common: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "dataset_kwargs": data}
    theirs = [
        {
            **common, "task": "ours_piqa", "output_type": "multiple_choice", "doc_to_text": "Question: {{goal}}\nAnswer:",
            "doc_to_choice": "{{[sol1, sol2]}}", "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        {
            **common, "task": "ours_lambada", "output_type": "loglikelihood", "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
    ]  # fmt: skip
    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float64")
    found = lm_eval.simple_evaluate(model=harness, tasks=theirs, log_samples=True, bootstrap_iters=0)
    subject = ScoredModel(model.double(), tokenizer, Framing((tokenizer.end_of_text,), ()), (tokenizer.end_of_text,))
    piqa, lambada = (score_task(open_task(f"{name}:rows.jsonl", tmp_path), subject) for name in ("piqa", "lambada"))
    for ours, sample in zip(piqa.rows, found["samples"]["ours_piqa"], strict=True):
        answers = [float(answer[0][0]) for answer in sample["resps"]]
        assert ours["log_likelihoods"] == pytest.approx(answers, abs=1e-6)
    for ours, sample in zip(lambada.rows, found["samples"]["ours_lambada"], strict=True):
        assert ours["log_likelihood"] == pytest.approx(float(sample["resps"][0][0][0]), abs=1e-6 * ours["tokens"])
        assert ours["greedy"] == sample["resps"][0][0][1]
    results = found["results"]
    assert piqa.scores["accuracy"]["value"] == results["ours_piqa"]["acc,none"]
    assert piqa.scores["accuracy_norm"]["value"] == results["ours_piqa"]["acc_norm,none"]
    assert lambada.scores["accuracy"]["value"] == results["ours_lambada"]["acc,none"]
    assert lambada.scores["perplexity"]["value"] == pytest.approx(results["ours_lambada"]["perplexity,none"], rel=1e-6)


def test_a_chat_template_begins_with_one_end_of_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    _, folder = exported("llama", tokenizer, tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    read.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    found = read.apply_chat_template([{"role": "user", "content": "They had"}], return_dict=False)
    assert found == [tokenizer.end_of_text, *tokenizer.encode("user: They had\n")]


def test_the_gate_works_from_text(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these exports has equal logits on equal ids, and is wrong in use."""
    written = files.write_json
    spoiled: dict[str, Any] = {}

    def spoil(path: Path, value: Any) -> None:
        written(path, {**value, **spoiled.get(path.name, {})})

    monkeypatch.setattr(files, "write_json", spoil)
    spoiled = {"tokenizer.json": {"post_processor": None}, "tokenizer_config.json": {"add_bos_token": False}}
    with pytest.raises(BessemerError, match=r"other ids for the text that begins .* at position 0, here \[0, \d+"):
        exported("qwen3", tokenizer, tmp_path)
    spoiled = {"tokenizer_config.json": {"padding_side": "left"}}
    with pytest.raises(BessemerError, match="the scores of a batch of texts differ by"):
        exported("bert", tokenizer, tmp_path, labels=3, pooling="first")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
