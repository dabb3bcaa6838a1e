import pytest

from bessemer.common.errors import InputError
from bessemer.recipe import parse

PLAIN = '[run]\nname = "r"\n[model]\ndepth = 2\n'


@pytest.mark.parametrize(
    "keys",
    [
        'path = "t.json"\nvocabulary = 300', 'path = "t.json"\nsample = "mixture"', 'path = "t.json"\nspecial_tokens = ["<x>"]',
        'path = "t.json"\ndigits = "single"', 'special_tokens = ["<x>", "<x>"]', 'special_tokens = ["<|endoftext|>"]',
        'special_tokens = [""]', 'digits = "pairs"',
    ],
)  # fmt: skip
def test_contradictory_tokenizer_keys_are_errors(keys: str) -> None:
    with pytest.raises(InputError):
        parse(f"{PLAIN}[tokenizer]\n{keys}\n", "test")


@pytest.mark.parametrize(
    "keys",
    [
        'sample = "mixture"',
        "sample_bytes = 1000",
        'pattern = "gpt2"',
        'digits = "single"',
        'white_space = "single"',
        "prefix_space = true",
    ],
)
def test_keys_of_a_new_tokenizer_are_errors_if_the_model_has_one(keys: str) -> None:
    text = PLAIN.replace("depth = 2", 'from = "hf:some/model"')
    with pytest.raises(InputError, match=f"tokenizer.{keys.split()[0]} "):
        parse(f"{text}[tokenizer]\n{keys}\n", "test")
    assert parse(f"{text}[tokenizer]\nvocabulary = 300\n{keys}\n", "test").model.from_ == "hf:some/model"
    # Special tokens are added to it, and the recipe that a run keeps can be read again with the tokenizer's path.
    for path in ("", 'path = "hf:some/model"\n'):
        assert parse(f'{text}[tokenizer]\n{path}special_tokens = ["<x>"]\n', "test").adds_tokens
