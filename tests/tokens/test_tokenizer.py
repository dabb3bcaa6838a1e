from pathlib import Path

import pytest

from bessemer.common.errors import InputError
from bessemer.tokens.tokenizer import Tokenizer
from tests.tokens.tokenizer_samples import END


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = Path(__file__).read_text(encoding="utf-8")
    return Tokenizer.train([text, Path(pytest.__file__).read_text(encoding="utf-8")], 420, END)


def test_a_vocabulary_the_text_cannot_support_is_refused() -> None:
    with pytest.raises(InputError, match=r"tokenizer.vocabulary = 5000: the text supports only \d+"):
        Tokenizer.train(["a short text"], 5000, END)


def test_loading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    assert Tokenizer.load(path, END).sha256 == tokenizer.sha256
    with pytest.raises(InputError, match="has no token '<eos>'"):
        Tokenizer.load(path, "<eos>")
    path.write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer.json"):
        Tokenizer.load(path, END)
    with pytest.raises(InputError, match="no such tokenizer file"):
        Tokenizer.load(tmp_path / "none.json", END)


def test_a_mask_token_is_special_and_never_comes_from_text() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], 420, END, "<|mask|>")
    assert (tokenizer.end_of_text, tokenizer.mask_token, tokenizer.vocabulary) == (0, 1, 420)
    assert tokenizer.token_bytes()[[0, 1]].tolist() == [0, 0]
    for one in (tokenizer, tokenizer.accelerate([text])):
        assert 1 not in one.encode("a <|mask|> b")
        assert tokenizer.decode(one.encode("a <|mask|> b")) == "a <|mask|> b"
    with pytest.raises(InputError, match="257 ids do not hold the 256 bytes and .* give 258 or more"):
        Tokenizer.train([text], 257, END, "<|mask|>")


def test_a_loaded_tokenizer_must_have_the_mask_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    inner = Tokenizer.train(["some text to train on " * 9], 261, END, "[MASK]")
    (tmp_path / "tokenizer.json").write_text(inner.to_json())
    with pytest.raises(InputError, match=r"no token '<\|mask\|>'; name the one it uses; .*'\[MASK\]'"):
        Tokenizer.load(tmp_path / "tokenizer.json", END, "<|mask|>")
    assert Tokenizer.load(tmp_path / "tokenizer.json", END, "[MASK]").mask_token == 1
    assert Tokenizer.load(tmp_path / "tokenizer.json", END).mask_token is None
    assert Tokenizer.load(tmp_path / "tokenizer.json", END).sha256 == inner.sha256


def test_what_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_marked):
        with pytest.raises(InputError, match=r"what follows 'caf' is no character; is the input UTF-8\?"):
            encode("caf\udce9")
