"""Training from another model keeps its conventions: ids around a text, chat template, generation settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import processors

from bessemer.cli import run_command
from bessemer.cli.chat import Template
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.patterns import NORMALIZERS, pattern_of
from tests.conftest import recipe_text, with_model, write_text

transformers = pytest.importorskip("transformers")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
SIZES = {
    "vocab_size": 405,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPECIAL = ["</s>", "<s>", "<pad>", "<end>", "<mask>"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text/, llama/ (bos, two eos ids, a chat template), qwen/ (nothing around a text) and roberta/."""
    folder = tmp_path_factory.mktemp("foreign")
    write_text(folder / "text")
    texts = [path.read_text() for path in sorted((folder / "text").rglob("*.*"))]
    plain = Tokenizer.train(texts, 405, SPECIAL[0], special_tokens=SPECIAL[1:]).to_json()
    qwen = Tokenizer.train(
        texts, 405, SPECIAL[0], special_tokens=SPECIAL[1:], regex=pattern_of("qwen2"), normalizer=NORMALIZERS["qwen2"]
    ).to_json()
    bos, ends = ("<s>", 1), ("</s>", 0)
    kinds: dict[str, tuple[str, dict[str, Any], Any, dict[str, str]]] = {
        "llama": ("Llama", {"bos_token_id": 1, "eos_token_id": [0, 3], "pad_token_id": 2, "max_position_embeddings": 64},
                  processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos]),
                  {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}),
        "qwen": ("Qwen2", {"bos_token_id": None, "num_key_value_heads": 2, "eos_token_id": 3, "pad_token_id": 2, "max_position_embeddings": 64}, None,
                 {"eos_token": "<end>", "pad_token": "<pad>"}),
        "roberta": ("Roberta", {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2, "max_position_embeddings": 67,
                                "type_vocab_size": 1}, processors.RobertaProcessing(ends, bos),
                    {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>",
                     "mask_token": "<mask>"}),
    }  # fmt: skip
    torch.manual_seed(0)
    for name, (family, settings, around, names) in kinds.items():
        head = "ForMaskedLM" if name == "roberta" else "ForCausalLM"
        configuration = getattr(transformers, f"{family}Config")(**SIZES, **settings)
        model = getattr(transformers, family + head)(configuration)
        if name != "roberta":
            model.generation_config = transformers.GenerationConfig(
                do_sample=True, temperature=0.6, **{key: settings[key] for key in settings if key.endswith("_token_id")}
            )
        model.save_pretrained(folder / name)
        inner = Library.from_str(qwen if name == "qwen" else plain)
        if around is not None:
            inner.post_processor = around
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder / name)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(place: Path, name: str, *overrides: str, start: str = "model.from", label: str = "") -> Path:
    text = recipe_text(place).replace('name = "small"', f'name = "{name}"').replace("vocabulary = 400\n", "")
    text = with_model(text, f'from = "hf:{name.partition("-")[0]}"' if start == "model.from" else "")
    if label:
        text = text.replace('name = "prose"', 'name = "prose"\nlabel = "prose"').replace(
            'name = "code"', 'name = "code"\nlabel = "code"'
        )
    (place / f"{name}.toml").write_text(text)
    sets = [part for one in ("train.steps=2", *overrides) for part in ("--set", one)]
    assert run_command(["run", str(place / f"{name}.toml"), *sets]) == 0
    return place / "runs" / name


def documents(folder: Path) -> list[list[int]]:
    """Return the first documents of a run's tokens."""
    store = TokenStore.open(folder / "tokens")
    shard = store.split(store.sources[0], "train").shards[0]
    return [
        shard.tokens[a:b].tolist() for a, b in zip(shard.offsets[:3].tolist(), shard.offsets[1:4].tolist(), strict=True)
    ]


def test_a_decoder_gets_its_bos_first_and_keeps_its_settings(place: Path) -> None:
    folder = run(place, "llama")
    for ids in documents(folder):
        assert ids[0] == 1 and ids[-1] == 0 and not {0, 1} & set(ids[1:-1])
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(at) for at in (place / "llama", folder / "export"))
    assert ours("He was")["input_ids"] == theirs("He was")["input_ids"]
    assert theirs.special_tokens_map.items() <= ours.special_tokens_map.items()
    talk = [{"role": "user", "content": "He was"}]
    assert (
        ours.apply_chat_template(talk, tokenize=False)
        == theirs.apply_chat_template(talk, tokenize=False)
        == "<s>He was</s>"
    )
    before, after = (
        json.loads((at / "generation_config.json").read_text()) for at in (place / "llama", folder / "export")
    )
    assert after == before and after["eos_token_id"] == [0, 3] and after["temperature"] == 0.6
    told = json.loads((folder / "export" / "config.json").read_text())
    assert (told["bos_token_id"], told["eos_token_id"], told["pad_token_id"]) == (1, [0, 3], 2)
    # The run itself follows the same conventions, and so does a run that starts from it, packed or not.
    assert TokenStore.open(folder / "tokens").ends == (0, 3)
    more = run(place, "llama-more", f"train.start={folder}", "tokens.packing=best-fit", start="train.start")
    store = TokenStore.open(more / "tokens")
    assert store.framing.before == (1,) and store.framing.after == () and store.ends == (0, 3)
    again = json.loads((more / "export" / "generation_config.json").read_text())
    assert again == before
    from bessemer.recipe import load
    from bessemer.tokens.loader import open_samples

    inputs, targets, starts, _ = open_samples(load(more), store, store.sources[0], "train").rows(np.arange(2))
    real = starts & (targets >= 0)
    assert (inputs[real] == 1).any() and not (inputs[real] == 0).any(), (
        "a document begins with bos, a later piece of it with its own"
    )
    assert not (targets == 1).any(), "bos is no target"


def test_a_decoder_without_bos_gets_none(place: Path) -> None:
    folder = run(place, "qwen")
    assert all(ids[-1] == 3 and 3 not in ids[:-1] for ids in documents(folder))
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(at) for at in (place / "qwen", folder / "export"))
    assert ours("He was")["input_ids"] == theirs("He was")["input_ids"]
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (None, "<end>", "<pad>")
    talk = [{"role": "user", "content": "He was"}]
    tokenizer = Tokenizer.load(folder / "tokens" / "tokenizer.json", "<end>")
    assert Template.choose(None, folder / "tokens", tokenizer).render(talk) == "He was<end>"
    assert {one.apply_chat_template(talk, tokenize=False) for one in (ours, theirs)} == {"He was<end>"}


@pytest.mark.parametrize("objective", ["masked", "classify"])
def test_an_encoder_reads_a_text_between_its_own_tokens(place: Path, objective: str) -> None:
    folder = run(
        place, f"roberta-{objective}", f"train.objective={objective}", label="yes" if objective == "classify" else ""
    )
    assert all(ids[0] == 1 and ids[-1] == 0 and not {0, 1} & set(ids[1:-1]) for ids in documents(folder))
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(at) for at in (place / "roberta", folder / "export"))
    assert ours("He was")["input_ids"] == theirs("He was")["input_ids"]
    assert ours("He was", "she had")["input_ids"] == theirs("He was", "she had")["input_ids"]
    assert theirs.special_tokens_map.items() <= ours.special_tokens_map.items()
    if objective == "classify":
        from bessemer.recipe import load
        from bessemer.tokens.held_out import held_out_samples
        from bessemer.train.task import ClassifyTask

        store = TokenStore.open(folder / "tokens")
        rows = held_out_samples(load(folder), store)[0].inputs
        lengths = ClassifyTask(load(folder).train, store.end_of_text, is_encoder=True)._lengths(torch.from_numpy(rows))
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            assert row[0] == 1 and row[length - 1] == 0 and not {0, 1} & set(row[1 : length - 1]), (
                "between <s> and </s>"
            )


@pytest.mark.parametrize(
    ("source", "overrides", "complaint"),
    [
        ("llama", ["train.objective=masked"], "train.objective: masked trains encoders"),
        ("roberta", ["tokens.sequence_length=256", "train.micro_batch=1"], "tokens.sequence_length: 256"),
        ("cut", [], "tensor model.norm.weight is missing"),
        ("nowhere", [], "tokenizer.json"),
        ("other ids", [], "or set export.hf=false"),
        ("llama", ["train.start=runs/x"], "train.start and model.from both give the starting weights"),
    ],
)
def test_an_unusable_start_is_an_error_before_the_corpus_is_read(
    place: Path, source: str, overrides: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if source == "cut":
        shutil.copytree(place / "llama", tmp_path / "cut")
        tensors = load_file(tmp_path / "cut" / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    if source == "other ids":  # a class of transformers that ignores the normalizer of tokenizer.json
        shutil.copytree(place / "llama", tmp_path / "other ids")
        for name, changed in (
            ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
            ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
        ):
            file = tmp_path / "other ids" / name
            file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    folder = tmp_path / source if source in ("cut", "nowhere", "other ids") else place / source
    text = recipe_text(place).replace("vocabulary = 400\n", "").replace('name = "small"', 'name = "never"')
    (tmp_path / "my.toml").write_text(with_model(text, f'from = "hf:{folder}"'))
    if source == "roberta":
        overrides = [*overrides, "train.objective=masked"]
    sets = [part for one in (*overrides, f"run.dir={tmp_path / 'runs'}") for part in ("--set", one)]
    assert run_command(["run", str(tmp_path / "my.toml"), *sets]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "nothing is begun"


@pytest.mark.parametrize("pooling", [None, "first"])
def test_a_classifier_keeps_its_pooling_unless_the_recipe_sets_it(place: Path, pooling: str | None) -> None:
    """A ModernBERT with mean pooling. The comparison of weights uses the folder's pooling, whatever is trained then."""
    configuration = transformers.ModernBertConfig(
        **SIZES, classifier_pooling="mean", num_labels=2, pad_token_id=2, bos_token_id=1, eos_token_id=0, cls_token_id=1,
        sep_token_id=0, max_position_embeddings=64, local_attention=16,
    )  # fmt: skip
    transformers.ModernBertForSequenceClassification(configuration).save_pretrained(place / "modernbert")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "roberta" / file, place / "modernbert" / file)
    asked = [f"train.classify.pooling={pooling}"] if pooling else []
    folder = run(place, f"modernbert-{pooling}", "train.objective=classify", *asked, label="yes")
    written = json.loads((folder / "export" / "config.json").read_text())
    assert written["classifier_pooling"] == ("cls" if pooling else "mean")
