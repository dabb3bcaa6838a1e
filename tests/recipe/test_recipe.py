import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from bessemer import recipe as recipes
from bessemer.cli.explain_key import explain
from bessemer.common.errors import InputError
from bessemer.model import recipe_defaults
from bessemer.recipe.corpus import is_data
from bessemer.recipe.keys import OTHER_NAMES, nearest
from bessemer.recipe.load import recipe_for_text
from bessemer.recipe.section import Section

SMALL = '[run]\nname = "x"\n\n[model]\ndepth = 2\n'


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (SMALL + "[train]\nstep = 3\n", "my.toml:7: train.step:"),
        (SMALL + "[train]\nsteps = '3'\n", "my.toml:7: train.steps:"),
        (SMALL + "[train]\nsteps = 3\ntokens = 9\n", "tokens and steps"),
        (SMALL + "layers = 3\n", "my.toml:4: model:"),
        ('[run]\nname = "x"\n[model]\nlayers = 2\nwidth = 32\nheads = 4\nkv_heads = 3\n', "kv_heads = 3"),
        ('[run]\nname = "x"\n[model]\nlayers = 2\n', "width"),
        (SMALL + "[tokens]\nsequence_length = 100\n[train]\nglobal_batch_tokens = 250\n", "200 or 300"),
        (SMALL + "[tokens]\nsequence_length = 10\n[train]\nglobal_batch_tokens = 60\nmicro_batch = 4\n", "take 4 or 8"),
        (SMALL + "[tokens]\nsequence_length = 10\n[train]\nglobal_batch_tokens = 40\nmicro_batch = 4\n[parallel]\nreplicate = 2\n", "train.micro_batch"),
        (SMALL + "[tokens]\nsequence_length = 10\n[train]\nglobal_batch_tokens = 40\n[parallel]\nshard = 3\n", "train.global_batch_tokens"),
        (SMALL + "[tokenizer]\nvocabulary = 300\npath = 'a'\n", "vocabulary and path"),
        ("[run\nname = 1", "my.toml: not valid TOML"),
        (SMALL + '[[corpus.sources]]\nname = "a"\npaths = ["a"]\nweight = 1.0\n[[corpus.sources]]\nname = "b"\npaths = ["b"]\n', "source 'b'"),
        (SMALL + "[train]\nobjective = 'masked'\n", "model.family"),
        (SMALL + "family = 'bert'\n", "train.objective"),
        (SMALL + "[train]\nobjective = 'classify'\n[[corpus.sources]]\nname = 'a'\npaths = ['a']\nlabel = 'x'\n[[corpus.sources]]\nname = 'b'\npaths = ['b']\n", "source 'b'"),
        (SMALL + '[[corpus.sources]]\nname = "a"\nformat = "jsonl"\npaths = ["a"]\nlabel = "x"\nlabel_key = "y"\n', "label and label_key"),
        (SMALL + "from = 'gpt2'\n", "model.from: write hf:gpt2"),
        (SMALL + "from = 'hf:m'\n[train]\nstart = 'runs/a'\n", "train.start and model.from"),
        (SMALL + '[corpus.sources]\nname = "a"\npaths = ["a"]\n', "my.toml:6: corpus.sources:"),
        (SMALL + '[[corpus.sources]]\nname = "a"\nformat = "txt"\npaths = ["a"]\n', "my.toml:8: corpus.sources.a.format"),
    ],
)  # fmt: skip
def test_errors_name_the_key_and_the_file(text: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        recipes.parse(text, "my.toml")
    assert where in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_encoders_are_the_bidirectional_families() -> None:
    from bessemer.model.huggingface.families import FAMILIES
    from bessemer.recipe.model import ENCODERS

    assert set(ENCODERS) == {name for name, family in FAMILIES.items() if not family.options.get("causal", True)}


def test_a_recipe_survives_its_own_dump() -> None:
    recipe = recipes.parse(SMALL, "x")
    assert recipes.parse(recipes.dump(recipe), "x") == recipe
    resolved = recipe_defaults.resolve(recipe, 32_768)
    assert recipes.as_resolved(recipes.parse(recipes.dump(resolved), "x"), recipes.ResolvedRecipe) == resolved


def test_overrides_set_keys() -> None:
    text = SMALL + '[[corpus.sources]]\nname = "a"\nformat = "text"\npaths = ["a"]\n'
    recipe = recipes.parse(
        text,
        "x",
        ["train.steps=50", "run.name=other", "corpus.sources.weight=2.5", "train.optimizer.learning_rate=1e-3"],
    )
    assert (recipe.train.steps, recipe.run.name) == (50, "other")
    assert recipe.corpus.sources[0].weight == 2.5
    assert recipe.train.optimizer.learning_rate == 1e-3
    for bad, complaint in [
        ("train.steps", "write it as key=value"),
        ("train.step=5", "train.step: unknown key; did you mean train.steps?"),
        ("corpus.sources.b.weight=1", "no corpus.sources is named 'b'; there are: a"),
        ("run.name.x=1", "run.name is not a table"),
    ]:
        with pytest.raises(InputError, match=complaint.replace("?", r"\?")):
            recipes.parse(text, "x", [bad])


WIDE = '[run]\nname = "x"\n\n[model]\nlayers = 2\nwidth = 32\nheads = 2\n\n[train]\ntokens = 900\n'
SOURCES = "".join(f'\n[[corpus.sources]]\nname = "{name}"\nformat = "text"\npaths = ["a"]\n' for name in "ab")


@pytest.mark.parametrize(
    "overrides",
    [
        ["evaluate.prompts=a"], ["model=3"], ["train.dropout.foo=1"], ["train.ema=0.5", "model.heads=3"],
        ["run.seed=2", "corpus.sources.b.weight=a"], ["run.seed=2", "train.objective=masked"], ["corpus.sources.weight=1"],
        ["tokens.schedule=[{from=0.1}]"], ["train.minutes=1", "train.tokens=9"],
    ],
    ids=str,
)  # fmt: skip
def test_an_error_of_an_override_names_the_override(overrides: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        recipes.parse(WIDE + SOURCES, "my.toml", overrides)
    assert f"--set {overrides[-1]}" in str(caught.value)


def test_an_error_of_the_file_names_the_file_even_with_overrides() -> None:
    wrong = WIDE + SOURCES + 'weight = "a"\n'  # of the second source
    with pytest.raises(InputError) as caught:
        recipes.parse(wrong, "my.toml", ["run.seed=a"])
    assert "my.toml:21: corpus.sources.b.weight: should be a number, got 'a'" in str(caught.value)
    assert "run.seed: should be a whole number, got 'a' (with --set run.seed=a)" in str(caught.value)
    with pytest.raises(InputError, match=r"my.toml:19: corpus.sources.b.format: "):
        recipes.parse(WIDE + SOURCES.replace('"b"\nformat = "text"', '"b"\nformat = "x"'), "my.toml")


def test_a_training_length_by_override_replaces_that_of_the_file() -> None:
    for key in ("steps", "minutes", "tokens"):
        train = recipes.parse(WIDE, "my.toml", [f"train.{key}=7"]).train
        assert [train.steps, train.minutes, train.tokens].count(None) == 2
        assert getattr(train, key) == 7


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.stepz", "train.steps"), ("trian.steps", "train.steps"), ("model.colour", None), ("train.adam", None),
        ("train.lr", "train.optimizer.learning_rate"), ("model.n_layer", "model.layers"), ("train.clip_norm", "train.optimizer.clip_norm"),
        ("train.checkpoint_every", "checkpoint.every"), ("model.name", None), ("model.hidden_dim", "model.mlp_width"),
    ],
)  # fmt: skip
def test_the_suggested_key_is_similar_or_missing(key: str, near: str | None) -> None:
    assert nearest(key, list(recipes.keys())) == near


def test_names_of_other_programs_suggest_keys() -> None:
    assert set(OTHER_NAMES.values()) <= set(recipes.keys())


def test_every_key_has_a_description() -> None:
    for key, info in recipes.keys().items():
        assert info.description, key
        assert info.description.endswith(".") or ":" in info.description, key
        assert info.description in explain(key)
    with pytest.raises(InputError, match="did you mean train.steps"):
        explain("train.stepz")
    assert re.search(r"guard\.max_rollbacks +3 +Rollbacks", explain("guard")), "a table shows the defaults of its keys"


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        SMALL + '[[corpus.sources]]\nname = "a"\nformat = "text"\npaths = ["text", "python://stdlib"]\n'
        '[corpus.rules.adult]\npath = "words"\n[corpus.rules.refinedweb]\ndomains = "lists/domains"\n'
        '[corpus.rules.toxic]\nclassifier = "toxic.bin"\nlabel = "toxic"\n'
    )
    recipe = recipes.load(tmp_path / "my.toml", ["corpus.dedup.against=['runs/old']", "tokenizer.path=t.json"])
    assert recipe.corpus.sources[0].paths == (str(tmp_path / "text"), "python://stdlib")
    assert recipe.corpus.dedup.against == (str(tmp_path / "runs/old"),)
    assert recipe.tokenizer.path == str(tmp_path / "t.json")
    assert recipe.corpus.rules.files() == [str(tmp_path / name) for name in ("lists/domains", "words", "toxic.bin")]


@pytest.mark.parametrize(
    ("name", "content"),
    [("texts/none", None), ("book.doc", b"\xd0\xcf\x11\xe0\0\0"), ("book.pdf", b"%PDF-1.7 of plain letters"), ("nothing", b"\n"),
     ("my.yaml", b"model:\n  depth: 4\n"), ("typo", b"[run]\nname = x\n"), ("broken", b"[run]\nname = 'x'\nsteps = \0"),
     ("my.toml", b"Dear all,")],
)  # fmt: skip
def test_a_file_that_is_neither_recipe_nor_text_is_an_error(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        recipes.load(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["a.txt", "b.TXT.gz", "c.csv", "d.json.zst", "e.py", "f.pq", "g.htm", "h.srt", "LICENSE"]
)
def test_a_readable_text_file_can_replace_a_recipe(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"" if is_data(Path(name)) else "Größe: [Text]\n".encode())
    found = recipes.load(tmp_path / name).corpus
    assert found.sources[0].paths == (str(tmp_path / name),)
    assert found.rules.max_characters >= 20_000_000  # a book is one document


@pytest.mark.parametrize("name", list(recipes.shipped()))
def test_shipped_recipes_are_valid_and_described(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.run.name == name
    assert recipes.shipped()[name].startswith("# ")
    if recipe.model.from_ is None:  # otherwise the model would have to exist
        recipe_defaults.resolve(recipe, recipe.tokenizer.vocabulary or 32_768)


@pytest.mark.parametrize("name", [name for name in recipes.shipped() if recipes.load(name).cluster.device])
def test_shipped_recipes_for_a_cluster_fit_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bessemer.cli import run_command

    assert run_command(["plan", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"], found
    recipe = recipes.load(name)
    assert recipe.parallel.world == 8 * recipe.cluster.nodes


def test_a_recipe_needs_no_ending_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(SMALL, encoding="utf-8-sig")
    assert recipes.load(tmp_path / "mine") == recipes.parse(SMALL, "x")


def test_differences_list_the_keys() -> None:
    old = recipes.parse(SMALL, "x")
    new = recipes.parse(SMALL, "x", ["train.steps=5", "corpus.rules.min_characters=3"])
    assert recipes.differences(old, new) == ["corpus.rules.min_characters: none -> 3", "train.steps: none -> 5"]


def test_the_recipe_shown_for_a_folder_has_the_overrides(tmp_path: Path) -> None:
    shown = recipes.parse(
        recipe_for_text(tmp_path, ["run.name=mx", "train.minutes=0.5", "corpus.sources.text.weight=2.0"]), "x"
    )
    assert (shown.run.name, shown.train.minutes, shown.corpus.sources[0].weight) == ("mx", 0.5, 2.0)


def numeric_keys(section: type[Section] = recipes.Recipe, path: str = "") -> Iterator[str]:
    """Return every key of the recipe that takes a number, in tables that occur once."""
    for name, info in section.model_fields.items():
        kinds = (info.annotation, *get_args(info.annotation))
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from numeric_keys(info.annotation, f"{path}{info.alias or name}.")
        elif path and {int, float} & set(kinds):
            yield f"{path}{info.alias or name}"


@pytest.mark.parametrize("value", ["nan", "-inf", str(2**64)])
def test_no_key_accepts_nan_or_too_large_numbers(value: str) -> None:
    keys = list(numeric_keys())
    assert {"run.seed", "evaluate.temperature", "train.optimizer.learning_rate"} <= set(keys) and len(keys) > 100
    for key in keys:
        with pytest.raises(InputError, match=key.rpartition(".")[2]):
            recipes.parse(f'run.name = "x"\n{key} = {value}\n', "r.toml")
        with pytest.raises(InputError):
            recipes.parse('run.name = "x"\n', "r.toml", [f"{key}={value}"])
