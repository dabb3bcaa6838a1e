"""Rule sets in the recipe: off, on with the published values, and with single values changed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bessemer import recipe as recipes
from bessemer.common.errors import InputError
from bessemer.recipe.rules import SETS
from tests.conftest import recipe_text


def test_a_rule_set_is_off_without_its_table(tmp_path: Path) -> None:
    text = recipe_text(tmp_path)
    rules = recipes.parse(text, "x").corpus.rules
    assert all(getattr(rules, name) is None for name in ("gopher_quality", "c4", "fineweb", "adult"))
    rules = recipes.parse(
        text + "\n[corpus.rules.c4]\n[corpus.rules.gopher_quality]\nmin_words = 20\n", "x"
    ).corpus.rules
    assert rules.c4 is not None
    assert rules.c4.min_sentences == 5
    assert rules.gopher_quality is not None
    assert (rules.gopher_quality.min_words, rules.gopher_quality.max_words) == (20, 100_000)
    assert recipes.parse(text, "x", ["corpus.rules.fineweb={}"]).corpus.rules.fineweb is not None


def test_a_recipe_with_every_rule_set_can_be_pickled(tmp_path: Path) -> None:
    """Tasks of Ray and of the tokens stage send it; it is written and read again."""
    sets = "".join(f"[corpus.rules.{name}]\n" for name in SETS if name != "refinedweb")
    sets += '[corpus.rules.refinedweb]\ndomains = "domains.txt"\n'
    recipe = recipes.parse(f"{recipe_text(tmp_path)}\n{sets}", "x")
    assert pickle.loads(pickle.dumps(recipe)) == recipe == recipes.parse(recipes.dump(recipe), "y")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[corpus.rules.c4]\nmin_sentence = 3", "did you mean corpus.rules.c4.min_sentences"),
        ("[corpus.rules.goper_quality]", "did you mean corpus.rules.gopher_quality"),
        ("[corpus.rules.fineweb]\nmax_short_line_share = 2.0", "max_short_line_share"),
        ('[corpus.rules.toxic]\nclassifier = "toxic.bin"', "corpus.rules.toxic"),
    ],
)
def test_mistakes_in_rule_sets_are_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipes.parse(f"{recipe_text(tmp_path)}\n{lines}\n", "x")
