"""To the Hugging Face layout, and the gate: an export that `transformers` does not reproduce is not published."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import BessemerError
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.weights import Value, parts
from bessemer.model.transformer import Transformer
from bessemer.run import staging, write_json

LOGITS_TOLERANCE = 1e-4  # largest absolute difference of a logit in fp32
SHARD_BYTES = 5_000_000_000  # what the hub's tools expect a weights file to stay under
GREEDY_TOKENS = 32


@dataclass(frozen=True)
class ExportCheck:
    """What the gate measured."""

    architecture: str
    parameters: int
    logits_max_difference: float
    tolerance: float
    greedy_tokens_equal: int
    tokenizer_documents_equal: int
    transformers: str


def export(
    model: Transformer,
    tokenizer_json: Path,
    end_of_text: int,
    folder: Path,
    sample: Tensor,
    texts: list[tuple[str, list[int]]],
    *,
    mask_token: int | None = None,
    labels: tuple[str, ...] = (),
) -> ExportCheck:
    """Write `model` to `folder` as its family's model and check it there.

    sample: (B, T) token ids on which the logits are compared; texts: documents with the ids they should have;
    mask_token: the id of an encoder's mask; labels: names of a classifier's classes.
    Raises BessemerError, and leaves `folder` as it was, when `transformers` gives other logits, other greedy
    tokens or other ids.
    """
    with staging(folder) as staged:
        write_weights(model, staged)
        write_settings(model, tokenizer_json, end_of_text, staged, mask_token, labels)
        check = verify(model, staged, sample, texts)
        files = {file.name: file.stat().st_size for file in sorted(staged.iterdir())}
        write_json(staged / "bessemer.json", {**check.__dict__, "files": files})
    return check


def write_settings(
    model: Transformer,
    tokenizer_json: Path,
    end_of_text: int,
    folder: Path,
    mask_token: int | None,
    labels: tuple[str, ...],
) -> None:
    """Everything but the weights."""
    settings = to_hugging_face(model.config, end_of_text)
    if labels:
        named = {str(number): name for number, name in enumerate(labels)}
        settings |= {"id2label": named, "label2id": {name: int(number) for number, name in named.items()}}
    write_json(folder / "config.json", settings)
    if model.config.causal and not model.config.labels:
        write_json(folder / "generation_config.json", {"bos_token_id": end_of_text, "eos_token_id": end_of_text})
    _write_tokenizer(tokenizer_json, end_of_text, mask_token, model.config.positions_length, folder)


@torch.no_grad()
def verify(model: Transformer, folder: Path, sample: Tensor, texts: list[tuple[str, list[int]]]) -> ExportCheck:
    """Load an export with `transformers` and compare weights, logits, greedy generation and token ids."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: never ask the network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    ours = model.float().eval()
    kind = getattr(transformers, to_hugging_face(ours.config, 0)["architectures"][0])
    theirs = kind.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = theirs.state_dict()
    for part in parts(ours):
        if part.name not in loaded:
            raise BessemerError(f"export: transformers' {kind.__name__} has no tensor {part.name}")
        if not torch.equal(loaded[part.name], part.theirs()):
            raise BessemerError(f"export: tensor {part.name} is not the same after loading it with transformers")
    difference = float((theirs(sample).logits - _logits(ours, sample)).abs().max())
    if not difference <= LOGITS_TOLERANCE:  # a NaN must not pass
        raise BessemerError(
            f"export: the logits of transformers' {type(theirs).__name__} differ by {difference:.2e}, more than "
            f"{LOGITS_TOLERANCE:.0e}; first in {_first_difference(ours, theirs, sample)}"
        )
    generates = ours.config.causal and not ours.config.labels
    equal = _greedy_equal(ours, theirs, sample[:1, : max(sample.shape[1] // 2, 1)]) if generates else 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ids in texts:
        if tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] != ids:
            raise BessemerError(
                f"export: transformers' tokenizer gives other ids for the text that begins {text[:60]!r}"
            )
    return ExportCheck(
        architecture=type(theirs).__name__,
        parameters=ours.config.parameters,
        logits_max_difference=difference,
        tolerance=LOGITS_TOLERANCE,
        greedy_tokens_equal=equal,
        tokenizer_documents_equal=len(texts),
        transformers=transformers.__version__,
    )


def write_weights(
    model: Transformer,
    folder: Path,
    value: Value = lambda parameter: parameter.detach(),
    shard_bytes: int | None = None,
) -> None:
    """safetensors, in files of at most SHARD_BYTES with an index, as the hub lays them out.

    value: gives each parameter's values when they are written, so that a model on the meta device can be written while
    one file's worth of it is in memory; shard_bytes: in place of SHARD_BYTES.
    """
    from safetensors.torch import save_file

    cut = [0]  # how many tensors each file has
    held = total = 0
    for part in parts(model):
        if held and held + part.nbytes > (shard_bytes or SHARD_BYTES):
            cut.append(0)
            held = 0
        cut[-1] += 1
        held += part.nbytes
        total += part.nbytes
    coming, index = parts(model, value), dict[str, str]()
    for number, count in enumerate(cut, start=1):
        name = f"model-{number:05d}-of-{len(cut):05d}.safetensors" if len(cut) > 1 else "model.safetensors"
        shard = {part.name: part.theirs().cpu() for part in islice(coming, count)}
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        del shard  # before the next one is read
    if len(cut) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_tokenizer(
    tokenizer_json: Path, end_of_text: int, mask_token: int | None, sequence_length: int, folder: Path
) -> None:
    text = tokenizer_json.read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    brought = [tokenizer_json.parent / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    for path in brought:  # an imported model's own
        if path.exists():
            (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    if brought[0].exists():
        return
    added = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
    token = added[end_of_text]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token,
            "eos_token": token,
            "pad_token": token,
            **({} if mask_token is None else {"mask_token": added[mask_token]}),
            "model_max_length": sequence_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def _logits(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Logits of tokens (B, T, V), or of texts (B, L)."""
    if not model.config.labels:
        return model.logits(tokens_BT)
    lengths_B = torch.full((len(tokens_BT),), tokens_BT.shape[1], device=tokens_BT.device)
    found: Tensor = model.classifier(model(tokens_BT), lengths_B)
    return found


def _greedy_equal(ours: Transformer, theirs: Any, prompt: Tensor) -> int:
    """Number of greedily generated tokens, all of which must agree; a tie within the tolerance is no disagreement."""
    room = min(GREEDY_TOKENS, ours.config.positions_length - prompt.shape[1])
    if room <= 0:
        return 0
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    text = prompt
    for position in range(prompt.shape[1], generated.shape[1]):
        logits = ours.logits(text)[0, -1]
        chosen, wanted = int(logits.argmax()), int(generated[0, position])
        if logits[chosen] - logits[wanted] > LOGITS_TOLERANCE:
            raise BessemerError(
                f"export: greedy generation differs at token {position - prompt.shape[1]}: {chosen} here, {wanted} in "
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
