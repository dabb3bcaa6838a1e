"""Comparison of token ids and logits with `transformers`, and safe loading of folders by it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.attention_scope import Documents
from bessemer.model.huggingface.config import understood_settings
from bessemer.model.transformer import Transformer
from bessemer.run.files import write_json
from bessemer.storage import hub
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing, framing_between

LOGITS_TOLERANCE = 1e-4  # maximum difference of a logit in fp32, relative to the largest logit or to 1
GREEDY_TOKENS = 32
SPECIAL_TOKENS = 64  # maximum number of special tokens that are compared
RUN = 200  # repetitions in a long run
# Arguments for loading a foreign model: no code or kernel from a repository, no pickle, no network.
SAFELY = {"attn_implementation": "eager", "trust_remote_code": False, "use_safetensors": True, "local_files_only": True}

Texts = list[tuple[str, list[int]]]


_TEXTS = tomllib.loads(Path(__file__).with_name("comparison_texts.toml").read_text(encoding="utf-8"))
PLAIN_TEXTS = tuple(_TEXTS["plain"])
GATE_TEXTS = (*chain.from_iterable(_TEXTS.values()), *(run * RUN for run in _TEXTS["runs"]))


def quiet_transformers() -> Any:
    """Return the module transformers, imported without its progress bars and warnings."""
    with hub.offline():  # older versions keep the setting in force at import
        import transformers

        transformers.utils.is_torchao_available()  # `offline` hides torchao, and transformers caches the answer
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer with `transformers`, without running code in the folder or following links out of it."""
    load = quiet_transformers().AutoTokenizer.from_pretrained
    with understood_copy(folder) as copy, errors_of("transformers cannot load the tokenizer"):
        return load(copy, trust_remote_code=False, local_files_only=True)


@contextmanager
def understood_copy(folder: Path, **changes: Any) -> Iterator[Path]:
    """Create a temporary folder with links to a model's files and a config.json with only the keys that Bessemer understands."""
    with TemporaryDirectory() as temporary:
        hub.link_files(folder, Path(temporary), but="config.json")
        write_json(Path(temporary, "config.json"), understood_settings(folder) | changes)
        yield Path(temporary)


@contextmanager
def errors_of(failure: str, kind: type[BessemerError] = InputError) -> Iterator[None]:
    """Keep `transformers` offline, and turn its errors of any type into one of `kind`, with `failure` before the message."""
    try:
        with hub.offline():
            yield
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"{failure}: {message[:300]}") from None


def framing_of(tokenizer: Any) -> Framing:
    """Return the ids that a tokenizer of `transformers` puts around a text by default."""
    framing = framing_between(tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"])
    if framing is None:
        raise BessemerError("tokenizers whose special tokens change the ids of the text are not supported")
    return framing


def compare_tokenizers(theirs: Any, ours: Tokenizer, framing: Framing) -> int:
    """Compare the ids of GATE_TEXTS and of text with special tokens, and return the number of texts.

    Raises BessemerError on the first difference.
    """
    marked = [f"a{name}b {name} c\n{name}" for name in list(ours.special.values())[:SPECIAL_TOKENS]]
    compare_ids(theirs, [(text, ours.encode(text)) for text in (*GATE_TEXTS, *marked)], framing)
    for text in marked:
        _require_equal_ids(theirs, text, theirs(text)["input_ids"], framing.around(ours.encode_marked(text)))
    return len(GATE_TEXTS) + len(marked)


def compare_ids(theirs: Any, texts: Texts, framing: Framing) -> Texts:
    """Require that a tokenizer of `transformers` encodes each text to its ids, and return the compared (text, ids).

    It is called with default arguments, except that text that looks like a special token is encoded as text; texts for
    which it cannot do that are skipped. `framing` has the ids that it puts around a text. Raises BessemerError on a
    difference.
    """
    added, compared = theirs.get_added_vocab(), Texts()
    for text, ids in texts:
        special = {number for token, number in added.items() if token in text}
        found_ids = (theirs(text, split_special_tokens=True) if special else theirs(text))["input_ids"]
        # Some tokenizers (Unigram) encode text that looks like a special token only as that token.
        if not special & set(found_ids[len(framing.before) : len(found_ids) - len(framing.after)]):
            _require_equal_ids(theirs, text, found_ids, framing.around(ids))
            compared.append((text, ids))
    return compared


def _require_equal_ids(tokenizer: Any, text: str, theirs: list[int], wanted: list[int]) -> None:
    if theirs != wanted:
        index = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(theirs, wanted, strict=False)))
        raise BessemerError(
            f"transformers' tokenizer gives other ids for the text {text[:60]!r}: "
            f"{theirs[index : index + 4]} at position {index}, here {wanted[index : index + 4]}"
        )


def tolerance_of(wanted: Tensor) -> float:
    """Return the tolerance for these logits: LOGITS_TOLERANCE, times the largest logit if that is above 1.

    GPT-2's logits are near 100, and rounding grows with them.
    """
    return LOGITS_TOLERANCE * max(1.0, float(wanted.abs().max()))


def require_close(numbers: Tensor, wanted: Tensor, subject: str, remedy: str = "") -> float:
    """Return the largest absolute difference. Raises BessemerError if it exceeds the tolerance, or if the shapes differ.

    `subject` starts the error message, and `remedy` ends it.
    """
    worst = float((numbers - wanted).abs().max()) if numbers.shape == wanted.shape else float("inf")
    if not worst <= (tolerance := tolerance_of(wanted)):  # a NaN must not pass
        raise BessemerError(f"{subject} differ by {worst:.2e}, more than {tolerance:.0e}{remedy}")
    return worst


def logits_of(model: Transformer, tokens_BT: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """Return a language model's logits, (B, T, V), or a classifier's, one for each text and label, (B, L).

    `lengths_B` has the number of tokens of each text, after which padding follows; None if there is no padding.
    """
    documents = None if lengths_B is None else Documents.padded(lengths_B, tokens_BT.shape[1])
    if lengths_B is None:
        lengths_B = torch.full((len(tokens_BT),), tokens_BT.shape[1], device=tokens_BT.device)
    hidden_BTD = model(tokens_BT, documents)
    return model.classifier(hidden_BTD, lengths_B) if model.config.labels else model.head.logits(hidden_BTD)  # type: ignore[no-any-return]


def compare_batches(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts, framing: Framing) -> None:
    """Raise BessemerError unless both models give the same logits for the texts, computed as one padded batch.

    Without a padding token, the texts are compared one by one.
    """
    limit = min(int(tokenizer.model_max_length), ours.config.positions_length)
    room = limit - len(framing.before) - len(framing.after)
    rows = [framing.around(ids[:room]) for _, ids in texts]
    size = len(texts) if tokenizer.pad_token_id is not None else 1
    for first in range(0, len(texts), max(size, 1)):
        batch = rows[first : first + size]
        encoded = tokenizer(
            [text for text, _ in texts[first : first + size]], padding=size > 1, truncation=True, max_length=limit,
            return_tensors="pt", split_special_tokens=True,
        )  # fmt: skip
        lengths_B = torch.tensor([len(row) for row in batch])
        padded_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        wanted, scores = theirs(**encoded).logits, logits_of(ours, padded_BT, lengths_B)
        if wanted.dim() == 3:  # a language model, whose logits at padding have no meaning
            inside_BT = torch.arange(padded_BT.shape[1]) < lengths_B[:, None]
            wanted, scores = wanted[encoded["attention_mask"].bool()], scores[inside_BT]
        if wanted.shape != scores.shape:
            raise BessemerError(f"a batch has {list(wanted.shape)} scores in transformers, here {list(scores.shape)}")
        require_close(wanted, scores, "the scores of a batch of texts")


def compare_greedy(ours: Transformer, theirs: Any, prompt_1T: Tensor) -> int:
    """Return the number of greedily generated tokens, all of which must agree except for ties within the tolerance."""
    length = prompt_1T.shape[1]
    room = min(GREEDY_TOKENS, ours.config.positions_length - length)
    if room <= 0:
        return 0
    theirs(prompt_1T[:, :1])  # dynamic positions keep the state of the longest sequence until they see a short one
    generated_1T = theirs.generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), max_new_tokens=room, do_sample=False,
        # Keys that transformers caches stay rotated as in the shorter sequence that they came from.
        use_cache=ours.config.rope_regime(length) == ours.config.rope_regime(length + room), eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for position in range(length, generated_1T.shape[1]):
        logits_V = ours.logits(generated_1T[:, :position])[0, -1]
        chosen, wanted = int(logits_V.argmax()), int(generated_1T[0, position])
        if logits_V[chosen] - logits_V[wanted] > tolerance_of(logits_V):
            raise BessemerError(f"greedy token {position - length} is {chosen} here, {wanted} in transformers")
    return int(generated_1T.shape[1] - length)
