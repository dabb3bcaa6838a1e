"""Sources split by language: from the recipe to shards and the order of training."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.corpus import pipeline
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Recipe, parse
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.tokens import build
from bessemer.tokens.phases import SourceSizes, mixture_of, recipe_phases

SPLIT = '[corpus.language]\nidentify = true\nmin_score = 0\nsplit = ["de"]\n'

ENGLISH = "the house of the old man stands at the end of the street and nobody knows who lives in it or why it is empty"
GERMAN = "das haus des alten mannes steht am ende der strasse und niemand weiss wer darin wohnt oder warum es leer ist"


def recipe(
    folder: Path, more: str, weights: tuple[str, str] = ("", ""), names: tuple[str, str] = ("web", "wiki")
) -> Recipe:
    tables = "".join(
        f'[[corpus.sources]]\nname = "{name}"\nformat = "text"\npaths = ["{folder / name}"]\n{weight}\n'
        for name, weight in zip(names, weights, strict=True)
    )
    return parse(
        f'[run]\nname = "x"\nseed = 4\n{tables}{more}[corpus.dedup]\nminhash = false\n[corpus.rules]\nmin_characters = 20\n'
        "[tokenizer]\nvocabulary = 300\n[model]\ndepth = 1\n[train]\nsteps = 1000\nglobal_batch_tokens = 320\n"
        "micro_batch = 10\n[tokens]\nsequence_length = 32\nheld_out = 0.1\n",
        "test",
    )


def test_a_recipe_lists_the_parts_of_its_sources(tmp_path: Path) -> None:
    found = recipe(tmp_path, SPLIT).parts
    assert found == {"web": "web", "web-de": "web", "wiki": "wiki", "wiki-de": "wiki"}
    with pytest.raises(InputError, match="'web-de'"):
        recipe(tmp_path, SPLIT, names=("web", "web-de"))


@pytest.mark.parametrize("weights", [("", ""), ("weight = 3", "weight = 1")])
def test_parts_divide_the_share_of_their_source_by_tokens(tmp_path: Path, weights: tuple[str, str]) -> None:
    of = resolve(recipe(tmp_path, SPLIT, weights), 300)
    held = SourceSizes(("web", "web-de", "wiki"), (600, 200, 400), (600 * 32, 200 * 32, 400 * 32))
    (phase,) = recipe_phases(of, held)
    web = Fraction(3, 4) if weights[0] else Fraction(2, 3)
    inner = [Fraction(600), Fraction(200)]
    assert phase.shares == (web * inner[0] / sum(inner), web * inner[1] / sum(inner), 1 - web)
    drawn = np.bincount(mixture_of(of, held).draw(0, 10_000).source, minlength=3) / 10_000
    assert drawn == pytest.approx([float(share) for share in phase.shares], abs=2e-4)


def shuffled(text: str, seed: int) -> str:
    """Return sentences of the same words in different orders."""
    draw, words = random.Random(seed), text.split()
    return ".\n".join(" ".join(draw.sample(words, len(words))) for _ in range(12))


def test_languages_become_separate_shards(tmp_path: Path) -> None:
    texts = [shuffled(GERMAN if seed % 3 == 0 else ENGLISH, seed) for seed in range(60)]
    wiki = [shuffled(ENGLISH, seed) for seed in range(100, 130)]
    for name, number, text in [
        *(("web", *one) for one in enumerate(texts)),
        *(("wiki", *one) for one in enumerate(wiki)),
    ]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{number}.txt").write_text(text)
    of, run = recipe(tmp_path, SPLIT), RunDirectory(tmp_path / "run")
    run.path.mkdir()
    pipeline.build(of, run)
    build.build(of, run)
    sources = read_json(run.tokens / "manifest.json")["sources"]
    counts = {name: sum(splits[split]["documents"] for split in splits) for name, splits in sources.items()}
    assert counts == {"web": 40, "web-de": 20, "wiki": 30}
    assert (tmp_path / "run" / "tokens" / "web-de-train-00000.bin").exists()
