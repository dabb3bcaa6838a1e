"""The gate: loads a folder in the Hugging Face layout with `transformers`' default arguments and compares it with our model.

It compares every tensor, logits, greedy generation and the ids of texts. Starting from text, as a user does, it compares
logits, greedy tokens and the scores of a padded batch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.attention_scope import Documents
from bessemer.model.huggingface.config import family_of, to_hugging_face, understood_settings
from bessemer.model.huggingface.weights import hub_tensors, is_unread
from bessemer.model.transformer import Transformer
from bessemer.run.files import write_json
from bessemer.storage import hub
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing, framing_between

LOGITS_TOLERANCE = 1e-4  # maximum difference of a logit in fp32, relative to the largest logit or to 1
GREEDY_TOKENS = 32
PROMPT_CHARACTERS = 40  # characters of a text that are the prompt for greedy generation
PROMPTS = 3
SPECIAL_TOKENS = 64  # maximum number of special tokens that are compared
RUN = 200  # repetitions in a long run
# Arguments for loading a foreign model: no code or kernel from a repository, no pickle, no network.
SAFELY = {"attn_implementation": "eager", "trust_remote_code": False, "use_safetensors": True, "local_files_only": True}

Texts = list[tuple[str, list[int]]]


@dataclass(frozen=True)
class ExportCheck:
    """Measurements from the comparison of an exported folder, loaded by `transformers`, with our model.

    Attributes:
        architecture: Class of transformers that loaded the folder.
        parameters: Number of parameters.
        logits_max_difference: Largest absolute difference of a logit.
        tolerance: Maximum difference allowed, relative to the largest logit if that is above 1.
        greedy_tokens_equal: Number of greedily generated tokens that were compared and equal.
        tokenizer_documents_equal: Number of texts whose token ids were compared and equal.
        texts_equal: Number of texts for which logits, greedy tokens or classes were compared and equal.
        transformers: Version of transformers.
    """

    architecture: str
    parameters: int
    logits_max_difference: float
    tolerance: float
    greedy_tokens_equal: int
    tokenizer_documents_equal: int
    texts_equal: int
    transformers: str


@torch.no_grad()
def verify(
    model: Transformer, folder: Path, sample_BT: Tensor, own: Tokenizer, texts: Texts, framing: Framing | None = None
) -> ExportCheck:
    """Load `folder`, an export or a foreign folder, with `transformers`, and compare it with `model` and its tokenizer `own`.

    Args:
        sample_BT: Token ids on which the logits are compared.
        texts: Texts to compare in addition to `GATE_TEXTS`, each with its ids without special tokens.
        framing: Special token ids that an export's tokenizer puts around a text; None for a foreign folder's own.

    Raises:
        BessemerError: The first difference.
    """
    transformers = quiet_transformers()
    ours = model.float().eval()
    config, family = ours.config, family_of(ours.config)
    kind = "SequenceClassification" if config.labels else "CausalLM" if config.causal else "MaskedLM"
    # A folder in bfloat16 would be computed in bfloat16, but differences are meaningful only in fp32.
    with hub.offline(), nullcontext(folder) if framing else understood_copy(folder) as path:
        load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
        try:
            theirs = load(path, dtype=torch.float32, **({} if framing else SAFELY)).eval()
        except Exception as error:  # transformers raises many types
            raise BessemerError(f"transformers cannot load it: {one_line(error)}{family.about('keys')}") from None
    architecture = to_hugging_face(config, 0)["architectures"][0]
    if type(theirs).__name__ != architecture:
        raise BessemerError(f"transformers loads a {type(theirs).__name__}, not a {architecture}")
    loaded, compared = _tensors_in_files(theirs), set[str]()
    for tensor in hub_tensors(ours):
        compared.add(tensor.name)
        if tensor.name not in loaded:
            raise BessemerError(
                f"transformers' {architecture} has no tensor {tensor.name}{family.about_tensor(tensor.name)}"
            )
        if not torch.equal(loaded[tensor.name], tensor.gather()):
            raise BessemerError(f"tensor {tensor.name} differs after loading it with transformers")
    for name in (name for name in loaded if name not in compared and not is_unread(name, family, config)):
        raise BessemerError(f"transformers' {architecture} has an additional tensor {name}{family.about_tensor(name)}")
    what = f"the logits of transformers' {architecture}{family.about('options')}"
    difference = require_close(logits_of(ours, sample_BT), theirs(sample_BT).logits, what)
    tokenizer = load_tokenizer(folder)
    framing = framing or framing_of(tokenizer)
    num_compared = len(texts) + compare_tokenizers(tokenizer, own, framing)
    texts = compare_ids(tokenizer, texts, framing)
    greedy = 0
    if config.causal and not config.labels:
        # Generation settings such as a repetition penalty change greedy text, so only the ids that end a text are kept.
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(theirs.generation_config, name) for name in names}
        theirs.generation_config = transformers.GenerationConfig(**ids)
        greedy = _compare_greedy(ours, theirs, sample_BT[:1, : max(sample_BT.shape[1] // 2, 1)])
        greedy += _compare_prompts(ours, theirs, tokenizer, texts[:PROMPTS])
        num_texts = len(texts[:PROMPTS])
    else:
        num_texts = len(texts)
        _compare_batches(ours, theirs, tokenizer, texts, framing)
    return ExportCheck(
        architecture, config.parameters, difference, LOGITS_TOLERANCE, greedy, num_compared, num_texts, transformers.__version__
    )  # fmt: skip


def _tensors_in_files(theirs: Any) -> dict[str, Tensor]:
    """Return the tensors of a model of `transformers` by their names in files, where each expert has its own."""
    tensors: dict[str, Tensor] = theirs.state_dict()
    with suppress(ImportError):  # before version 5 of transformers, the names in files and in modules are equal
        from transformers.core_model_loading import revert_weight_conversion

        theirs._weight_conversions = None  # they contain the old names of the files that were loaded, if they had any
        tensors = revert_weight_conversion(theirs, tensors)
    return tensors


_TEXTS = tomllib.loads(Path(__file__).with_name("gate_texts.toml").read_text(encoding="utf-8"))
PLAIN_TEXTS = tuple(_TEXTS["plain"])
GATE_TEXTS = (*chain.from_iterable(_TEXTS.values()), *(run * RUN for run in _TEXTS["runs"]))


@contextmanager
def errors_about(subject: str) -> Iterator[None]:
    """Prefix each BessemerError of this context with `subject`, the folder or the export that is checked."""
    try:
        yield
    except BessemerError as error:
        raise type(error)(f"{subject}: {error}") from None


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
    with understood_copy(folder) as copy, hub.offline():
        try:
            return load(copy, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises many types
            raise InputError(f"transformers cannot load the tokenizer: {one_line(error)}") from None


@contextmanager
def understood_copy(folder: Path, **changes: Any) -> Iterator[Path]:
    """Create a temporary folder with links to a model's files and a config.json with only the keys that Bessemer understands."""
    with TemporaryDirectory() as temporary:
        hub.link_files(folder, Path(temporary), but="config.json")
        write_json(Path(temporary, "config.json"), understood_settings(folder) | changes)
        yield Path(temporary)


def one_line(error: Exception) -> str:
    """Return the message of any library's error in one line of at most 300 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


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


def _compare_prompts(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts) -> int:
    """Compare the logits of each text and its greedy continuation, and return the number of tokens generated.

    Raises BessemerError on the first difference.
    """
    limit, greedy = ours.config.positions_length, 0
    for text, _ in texts:
        ids_1T = tokenizer(text, return_tensors="pt")["input_ids"][:, :limit]
        if ids_1T.shape[1]:
            theirs(ids_1T[:, :1])  # resets dynamic positions, see _compare_greedy
            require_close(logits_of(ours, ids_1T), theirs(ids_1T).logits, f"the logits of the text {text[:40]!r}")
        prompt_1T = tokenizer(text[:PROMPT_CHARACTERS], return_tensors="pt")["input_ids"][:, : limit // 2]
        if prompt_1T.shape[1]:
            greedy += _compare_greedy(ours, theirs, prompt_1T, may_end=True)
    return greedy


def _compare_batches(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts, framing: Framing) -> None:
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


def _compare_greedy(ours: Transformer, theirs: Any, prompt_1T: Tensor, may_end: bool = False) -> int:
    """Return the number of greedily generated tokens, all of which must agree except for ties within the tolerance.

    With `may_end`, generation stops at the folder's end-of-text ids.
    """
    length = prompt_1T.shape[1]
    room = min(GREEDY_TOKENS, ours.config.positions_length - length)
    if room <= 0:
        return 0
    never_end = {} if may_end else {"eos_token_id": None, "pad_token_id": 0}
    theirs(prompt_1T[:, :1])  # dynamic positions keep the state of the longest sequence until they see a short one
    generated_1T = theirs.generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), max_new_tokens=room, do_sample=False,
        # Keys that transformers caches stay rotated as in the shorter sequence that they came from.
        use_cache=ours.config.rope_regime(length) == ours.config.rope_regime(length + room), **never_end,
    )  # fmt: skip
    for position in range(length, generated_1T.shape[1]):
        logits_V = ours.logits(generated_1T[:, :position])[0, -1]
        chosen, wanted = int(logits_V.argmax()), int(generated_1T[0, position])
        if logits_V[chosen] - logits_V[wanted] > tolerance_of(logits_V):
            raise BessemerError(f"greedy token {position - length} is {chosen} here, {wanted} in transformers")
    return int(generated_1T.shape[1] - length)
