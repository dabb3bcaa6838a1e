"""The gate: a folder in the Hugging Face layout is loaded with `transformers`' default arguments and compared with ours.

Compared: every tensor, logits, greedy generation, the ids of texts, and from text on what a user gets: logits, greedy
tokens, the scores of a padded batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import BessemerError, InputError
from bessemer.model.attention import Documents
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.weights import parts
from bessemer.model.transformer import Transformer
from bessemer.tokens.pieces import Framing, framing_between

LOGITS_TOLERANCE = 1e-4  # largest difference of a logit in fp32, of the largest one or of 1
GREEDY_TOKENS = 32
PROMPT_CHARACTERS = 40  # of a text from which greedy generation is compared
PROMPTS = 3

Texts = list[tuple[str, list[int]]]


@dataclass(frozen=True)
class ExportCheck:
    """What the gate measured. texts_equal: texts from which logits, greedy tokens or classes were compared."""

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
    model: Transformer, folder: Path, sample: Tensor, texts: Texts, framing: Framing | None = None
) -> ExportCheck:
    """Load a folder with `transformers` and compare it with `model`.

    sample: (B, T) ids; texts: each with its own ids, without special tokens; framing: the ids that must stand around those
    of a text, None: whatever the folder's tokenizer puts there. Raises BessemerError on the first difference.
    """
    transformers = quiet_transformers()
    ours = model.float().eval()
    config = ours.config
    kind = "SequenceClassification" if config.labels else "CausalLM" if config.causal else "MaskedLM"
    # A folder in bfloat16 would be computed in bfloat16: only in fp32 do differences mean anything.
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype=torch.float32).eval()
    architecture = to_hugging_face(config, 0)["architectures"][0]
    if type(theirs).__name__ != architecture:
        raise BessemerError(f"transformers loads a {type(theirs).__name__}, not a {architecture}")
    _compare_tensors(ours, theirs)
    difference = _checked(
        _logits(ours, sample),
        theirs(sample).logits,
        f"the logits of transformers' {architecture}",
        lambda: f"; first in {_first_difference(ours, theirs, sample)}",
    )
    tokenizer = their_tokenizer(folder)
    framing = framing or their_framing(tokenizer)
    compare_ids(tokenizer, texts, framing)
    greedy = 0
    if config.causal and not config.labels:
        _keep_only_ends(theirs, transformers)
        greedy = _greedy_equal(ours, theirs, sample[:1, : max(sample.shape[1] // 2, 1)])
        compared, more = _from_text(ours, theirs, tokenizer, texts)
        greedy += more
    else:
        compared = _batch_from_text(ours, theirs, tokenizer, texts, framing)
    return ExportCheck(
        architecture=architecture,
        parameters=config.parameters,
        logits_max_difference=difference,
        tolerance=LOGITS_TOLERANCE,
        greedy_tokens_equal=greedy,
        tokenizer_documents_equal=len(texts),
        texts_equal=compared,
        transformers=transformers.__version__,
    )


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Begin the errors of a check with what is checked: an export, or the folder that is imported."""
    try:
        yield
    except BessemerError as error:
        raise type(error)(f"{what}: {error}") from None


def quiet_transformers() -> Any:
    """The library, without its progress bars and without asking the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def their_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as `transformers` loads it; code in the folder is not run, and nobody is asked about it."""
    try:
        return quiet_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever its code and its validation raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"transformers does not read its tokenizer: {reason[:300]}") from None


def their_framing(tokenizer: Any) -> Framing:
    """The ids that a tokenizer of `transformers` puts around a text by default."""
    found = framing_between(tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"])
    if found is None:
        raise BessemerError(
            "the tokenizer changes the ids of a text when it adds special tokens; that is not supported"
        )
    return found


def _compare_tensors(ours: Transformer, theirs: Any) -> None:
    loaded = theirs.state_dict()
    for part in parts(ours):
        if part.name not in loaded:
            raise BessemerError(f"transformers' {type(theirs).__name__} has no tensor {part.name}")
        if not torch.equal(loaded[part.name], part.theirs()):
            raise BessemerError(f"tensor {part.name} is not the same after loading it with transformers")


def compare_ids(tokenizer: Any, texts: Texts, framing: Framing) -> None:
    """Ids by default arguments; text that looks like a special token is text only where that is asked for."""
    special = set(tokenizer.get_added_vocab())
    for text, ids in texts:
        wanted, looks_special = framing.around(ids), any(token in text for token in special)
        found = tokenizer(text, split_special_tokens=True) if looks_special else tokenizer(text)
        if found["input_ids"] != wanted:
            pairs = zip(found["input_ids"], wanted, strict=False)
            place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            raise BessemerError(
                f"transformers' tokenizer gives other ids for the text that begins {text[:60]!r}: "
                f"{found['input_ids'][place : place + 4]} at position {place}, here {wanted[place : place + 4]}"
                + _replaced_part(tokenizer)
            )


def _replaced_part(tokenizer: Any) -> str:
    """The end of a sentence: what of tokenizer.json a class of `transformers` ignores, and what to do; empty: nothing."""
    file = Path(tokenizer.name_or_path) / "tokenizer.json"
    used = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    description = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    parts = [part for part in ("pre_tokenizer", "normalizer") if used.get(part) != description.get(part)]
    if not used or not description or not parts:
        return ""
    kind = type(tokenizer).__name__
    return (
        f"; for this model_type it loads {kind}, which has a {' and a '.join(parts)} of its own and ignores those of "
        f"tokenizer.json. If the model was trained with {kind}, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) "
        "writes that tokenizer; if not, transformers cannot encode text as in its training"
    )


def _keep_only_ends(theirs: Any, transformers: Any) -> None:
    """Generation settings such as a repetition penalty change greedy text; what ends a text stays."""
    settings = theirs.generation_config
    theirs.generation_config = transformers.GenerationConfig(
        bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id, pad_token_id=settings.pad_token_id
    )


def _from_text(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts) -> tuple[int, int]:
    """Texts whose logits and greedy continuation are equal, and the number of tokens continued."""
    limit, greedy = ours.config.positions_length, 0
    chosen = texts[:PROMPTS]
    for text, _ in chosen:
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :limit]
        if ids.shape[1]:
            theirs(ids[:, :1])  # see _greedy_equal
            _checked(_logits(ours, ids), theirs(ids).logits, f"the logits of the text {text[:40]!r}")
        prompt = tokenizer(text[:PROMPT_CHARACTERS], return_tensors="pt")["input_ids"][:, : limit // 2]
        if prompt.shape[1]:
            greedy += _greedy_equal(ours, theirs, prompt, may_end=True)
    return len(chosen), greedy


def _batch_from_text(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts, framing: Framing) -> int:
    """Texts whose scores are equal in one padded batch, or one by one where the tokenizer has no padding token."""
    if not texts:
        return 0
    limit = min(int(tokenizer.model_max_length), ours.config.positions_length)
    room = limit - len(framing.before) - len(framing.after)
    rows = [framing.around(ids[:room]) for _, ids in texts]
    size = len(texts) if tokenizer.pad_token_id is not None else 1
    for first in range(0, len(texts), size):
        here = rows[first : first + size]
        encoded = tokenizer(
            [text for text, _ in texts[first : first + size]], padding=size > 1, truncation=True, max_length=limit,
            return_tensors="pt", split_special_tokens=True,
        )  # fmt: skip
        lengths = torch.tensor([len(row) for row in here])
        padded = torch.zeros(len(here), int(lengths.max()), dtype=torch.long)
        for row, ids in zip(padded, here, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        found, wanted = theirs(**encoded).logits, _logits(ours, padded, lengths)
        if found.dim() == 3:  # a language model: what stands on padding means nothing
            inside = torch.arange(padded.shape[1]) < lengths[:, None]
            found, wanted = found[encoded["attention_mask"].bool()], wanted[inside]
        if found.shape != wanted.shape:
            raise BessemerError(f"a batch of texts gives {list(found.shape)} scores, here {list(wanted.shape)}")
        _checked(found, wanted, "the scores of a batch of texts")
    return len(texts)


def tolerance_of(wanted: Tensor) -> float:
    """LOGITS_TOLERANCE of the largest logit, where that is above 1: GPT-2's are near 100, and rounding grows with them."""
    return LOGITS_TOLERANCE * max(1.0, float(wanted.abs().max()))


def _checked(found: Tensor, wanted: Tensor, what: str, where: Any = lambda: "") -> float:
    worst, tolerance = float((found - wanted).abs().max()), tolerance_of(wanted)
    if not worst <= tolerance:  # a NaN must not pass
        raise BessemerError(f"{what} differ by {worst:.2e}, more than {tolerance:.0e}{where()}")
    return worst


def _logits(model: Transformer, tokens_BT: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """Logits of tokens (B, T, V), or of texts (B, L). lengths_B: tokens of each text, left out: all."""
    documents = None if lengths_B is None else Documents.padded(lengths_B, tokens_BT.shape[1])
    if lengths_B is None:
        lengths_B = torch.full((len(tokens_BT),), tokens_BT.shape[1], device=tokens_BT.device)
    hidden_BTD = model(tokens_BT, documents)
    found: Tensor = model.classifier(hidden_BTD, lengths_B) if model.config.labels else model.head.logits(hidden_BTD)
    return found


def _greedy_equal(ours: Transformer, theirs: Any, prompt: Tensor, may_end: bool = False) -> int:
    """Number of greedily generated tokens, all of which must agree; a tie within the tolerance is no disagreement.

    may_end: generation stops at the ids that the folder says end a text.
    """
    room = min(GREEDY_TOKENS, ours.config.positions_length - prompt.shape[1])
    if room <= 0:
        return 0
    never = {} if may_end else {"eos_token_id": None, "pad_token_id": 0}
    first, last = (ours.config.rope_regime(prompt.shape[1] + more) for more in (0, room))
    theirs(prompt[:, :1])  # dynamic positions remember the longest sequence until they see a short one
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, do_sample=False,
        use_cache=first == last,  # keys that transformers keeps stay rotated as in the shorter sequence they came from
        **never,
    )  # fmt: skip
    text = prompt
    for position in range(prompt.shape[1], generated.shape[1]):
        logits = ours.logits(text)[0, -1]
        chosen, wanted = int(logits.argmax()), int(generated[0, position])
        if logits[chosen] - logits[wanted] > tolerance_of(logits):
            raise BessemerError(
                f"greedy generation differs at token {position - prompt.shape[1]}: {chosen} here, {wanted} in "
                "transformers"
            )
        text = generated[:, : position + 1]
    return int(generated.shape[1] - prompt.shape[1])


def _first_difference(ours: Transformer, theirs: Any, sample: Tensor) -> str:
    """The first place on the way through the model where the two differ, for the error message."""
    hidden = theirs(sample, output_hidden_states=True).hidden_states
    mine: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: mine.append(out)) for block in ours.blocks]
    try:
        ours(sample)
    finally:
        for hook in hooks:
            hook.remove()
    # The last of their hidden states is after the final norm, so the last block is compared only through the head.
    for number, (left, right) in enumerate(zip(mine[:-1], hidden[1:], strict=False)):
        if not float((left - right).abs().max()) <= LOGITS_TOLERANCE:
            return f"model.layers.{number}"
    return f"model.layers.{len(mine) - 1}, the last norm or the head"
