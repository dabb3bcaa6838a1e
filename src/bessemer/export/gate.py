"""The gate: loads a folder in the Hugging Face layout with `transformers`' default arguments and compares it with our model.

It compares every tensor, logits, greedy generation and the ids of texts. Starting from text, as a user does, it compares
logits, greedy tokens and the scores of a padded batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import BessemerError
from bessemer.model.huggingface import comparison
from bessemer.model.huggingface.comparison import Texts, logits_of, require_close
from bessemer.model.huggingface.config import family_of, to_hugging_face
from bessemer.model.huggingface.weights import hub_tensors, is_unread
from bessemer.model.transformer import Transformer
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing

PROMPT_CHARACTERS = 40  # characters of a text that are the prompt for greedy generation
PROMPTS = 3


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
        transformers: Version of transformers.
    """

    architecture: str
    parameters: int
    logits_max_difference: float
    tolerance: float
    greedy_tokens_equal: int
    tokenizer_documents_equal: int
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
    transformers = comparison.quiet_transformers()
    ours = model.float().eval()
    config, family = ours.config, family_of(ours.config)
    kind = "SequenceClassification" if config.labels else "CausalLM" if config.causal else "MaskedLM"
    # A folder in bfloat16 would be computed in bfloat16, but differences are meaningful only in fp32.
    source = nullcontext(folder) if framing else comparison.understood_copy(folder)
    with source as path, comparison.errors_of(f"transformers cannot load it{family.about('keys')}", BessemerError):
        load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
        theirs = load(path, dtype=torch.float32, **({} if framing else comparison.SAFELY)).eval()
    architecture = to_hugging_face(config, 0)["architectures"][0]
    if type(theirs).__name__ != architecture:
        raise BessemerError(f"transformers loads a {type(theirs).__name__}, not a {architecture}")
    loaded, wanted = _tensors_in_files(theirs), {tensor.name: tensor for tensor in hub_tensors(ours)}
    for name in sorted(wanted.keys() ^ loaded.keys()):
        if name in wanted or not is_unread(name, family, config):
            has = "has no" if name in wanted else "has an additional"
            raise BessemerError(f"transformers' {architecture} {has} tensor {name}{family.about_tensor(name)}")
    for name, tensor in wanted.items():
        if not torch.equal(loaded[name], tensor.gather()):
            raise BessemerError(f"tensor {name} differs after loading it with transformers")
    what = f"the logits of transformers' {architecture}{family.about('options')}"
    difference = require_close(logits_of(ours, sample_BT), theirs(sample_BT).logits, what)
    tokenizer = comparison.load_tokenizer(folder)
    framing = framing or comparison.framing_of(tokenizer)
    num_compared = len(texts) + comparison.compare_tokenizers(tokenizer, own, framing)
    texts = comparison.compare_ids(tokenizer, texts, framing)
    greedy = 0
    if config.causal and not config.labels:
        # A repetition penalty of the folder would change greedy text.
        theirs.generation_config = transformers.GenerationConfig()
        greedy = comparison.compare_greedy(ours, theirs, sample_BT[:1, : max(sample_BT.shape[1] // 2, 1)])
        greedy += _compare_prompts(ours, theirs, tokenizer, texts[:PROMPTS])
    else:
        comparison.compare_batches(ours, theirs, tokenizer, texts, framing)
    return ExportCheck(
        architecture, config.parameters, difference, comparison.LOGITS_TOLERANCE, greedy, num_compared,
        transformers.__version__,
    )  # fmt: skip


def _tensors_in_files(theirs: Any) -> dict[str, Tensor]:
    """Return the tensors of a model of `transformers` by their names in files, where each expert has its own."""
    tensors: dict[str, Tensor] = theirs.state_dict()
    with suppress(ImportError):  # before version 5 of transformers, the names in files and in modules are equal
        from transformers.core_model_loading import revert_weight_conversion

        theirs._weight_conversions = None  # they contain the old names of the files that were loaded, if they had any
        tensors = revert_weight_conversion(theirs, tensors)
    return tensors


@contextmanager
def errors_about(subject: str) -> Iterator[None]:
    """Prefix each BessemerError of this context with `subject`, the folder or the export that is checked."""
    try:
        yield
    except BessemerError as error:
        raise type(error)(f"{subject}: {error}") from None


def _compare_prompts(ours: Transformer, theirs: Any, tokenizer: Any, texts: Texts) -> int:
    """Compare the logits of each text and its greedy continuation, and return the number of tokens generated.

    Raises BessemerError on the first difference.
    """
    limit, greedy = ours.config.positions_length, 0
    for text, _ in texts:
        ids_1T = tokenizer(text, return_tensors="pt")["input_ids"][:, :limit]
        if ids_1T.shape[1]:
            theirs(ids_1T[:, :1])  # resets dynamic positions, see comparison.compare_greedy
            require_close(logits_of(ours, ids_1T), theirs(ids_1T).logits, f"the logits of the text {text[:40]!r}")
        prompt_1T = tokenizer(text[:PROMPT_CHARACTERS], return_tensors="pt")["input_ids"][:, : limit // 2]
        if prompt_1T.shape[1]:
            greedy += comparison.compare_greedy(ours, theirs, prompt_1T)
    return greedy
