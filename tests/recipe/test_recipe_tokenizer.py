from pathlib import Path

import pytest

from bessemer.errors import InputError
from bessemer.recipe import load, parse

PLAIN = '[run]\nname = "r"\n[model]\ndepth = 2\n'


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ('path = "t.json"\nvocabulary = 300', "vocabulary and path exclude each other"),
        ('path = "t.json"\nsample = "mixture"', "sample and path exclude each other"),
        ('path = "t.json"\nspecial_tokens = ["<x>"]', "special_tokens and path exclude each other"),
        ('path = "t.json"\ndigits = "single"', "digits and path exclude each other"),
        ('special_tokens = ["<x>", "<x>"]', "'<x>' is empty or named twice"),
        ('special_tokens = ["<|endoftext|>"]', "is empty or named twice"),
        ('special_tokens = [""]', "is empty or named twice"),
        ('digits = "pairs"', "digits"),
    ],
)
def test_what_cannot_be_is_refused(keys: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse(f"{PLAIN}[tokenizer]\n{keys}\n", "test")


def test_paths_are_taken_from_the_recipe_s_folder(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        f'{PLAIN}[tokenizer]\npath = "t.json"\ncompare = ["a/tokenizer.json"]\n'
        '[[tokens.sources]]\nname = "theirs"\nformat = "megatron"\npaths = ["x/*.bin"]\ntokenizer = "t.json"\nweight = 2.0\n'
    )
    recipe = load(tmp_path / "r.toml")
    assert recipe.tokenizer.compare == (str(tmp_path / "a/tokenizer.json"),)
    assert recipe.tokens.sources[0].paths == (str(tmp_path / "x/*.bin"),)
    assert recipe.tokens.sources[0].tokenizer == recipe.tokenizer.path == str(tmp_path / "t.json")
    assert recipe.source_weights == {"theirs": 2.0}
