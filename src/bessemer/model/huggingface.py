"""To the Hugging Face layout, and the gate: an export that `transformers` does not reproduce is not published."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import BessemerError
from bessemer.model.config import ModelConfig
from bessemer.model.decoder import Decoder
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
    decoder: Decoder,
    tokenizer_json: Path,
    end_of_text: int,
    folder: Path,
    sample: Tensor,
    texts: list[tuple[str, list[int]]],
) -> ExportCheck:
    """Write `decoder` to `folder` as a Llama or Qwen3 model and check it there.

    sample: (B, T) token ids on which the logits are compared; texts: documents with the ids they should have.
    Raises BessemerError, and leaves `folder` as it was, when `transformers` gives other logits, other greedy
    tokens or other ids.
    """
    with staging(folder) as staged:
        _write_weights(decoder, staged)
        write_json(staged / "config.json", _config(decoder.config, end_of_text))
        write_json(staged / "generation_config.json", {"bos_token_id": end_of_text, "eos_token_id": end_of_text})
        _write_tokenizer(tokenizer_json, end_of_text, decoder.config.sequence_length, staged)
        check = verify(decoder, staged, sample, texts)
        files = {file.name: file.stat().st_size for file in sorted(staged.iterdir())}
        write_json(staged / "bessemer.json", {**check.__dict__, "files": files})
    return check


@torch.no_grad()
def verify(decoder: Decoder, folder: Path, sample: Tensor, texts: list[tuple[str, list[int]]]) -> ExportCheck:
    """Load an export with `transformers` and compare weights, logits, greedy generation and token ids."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: never ask the network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = decoder.float().eval()
    loaded = theirs.state_dict()
    for name, weight in hugging_face_weights(ours):
        if name not in loaded:
            raise BessemerError(f"export: transformers' {type(theirs).__name__} has no tensor {name}")
        if not torch.equal(loaded[name], weight):
            raise BessemerError(f"export: tensor {name} is not the same after loading it with transformers")
    difference = float((theirs(sample).logits - ours.logits(sample)).abs().max())
    if not difference <= LOGITS_TOLERANCE:  # a NaN must not pass
        raise BessemerError(
            f"export: the logits of transformers' {type(theirs).__name__} differ by {difference:.2e}, more than "
            f"{LOGITS_TOLERANCE:.0e}; first in {_first_difference(ours, theirs, sample)}"
        )
    equal = _greedy_equal(ours, theirs, sample[:1, : max(sample.shape[1] // 2, 1)])
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


def hugging_face_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under the names of Llama and Qwen3. Heads and rotary halves lie alike, so parts are cut, not permuted."""
    yield "model.embed_tokens.weight", decoder.embedding.weight
    yield "model.norm.weight", decoder.norm.weight
    if not decoder.config.tie_embeddings:
        yield "lm_head.weight", decoder.head.weight
    for number, block in enumerate(decoder.blocks):
        for name, weight in _block_weights(block):
            yield f"model.layers.{number}.{name}.weight", weight


def _block_weights(block: Any) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = block.attention, block.mlp
    q, k, v = (part.flatten(0, 2) for part in attention.qkv.split([attention.queries, 1, 1], dim=1))
    gate, up = mlp.gate_up
    yield from (("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v))
    yield "self_attn.o_proj", attention.out.weight
    if not isinstance(attention.q_norm, torch.nn.Identity):
        yield from (("self_attn.q_norm", attention.q_norm.weight), ("self_attn.k_norm", attention.k_norm.weight))
    yield from (("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", mlp.down.weight))
    yield "input_layernorm", block.attention_norm.weight
    yield "post_attention_layernorm", block.mlp_norm.weight


def _config(config: ModelConfig, end_of_text: int) -> dict[str, Any]:
    family = "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }


def _write_weights(decoder: Decoder, folder: Path) -> None:
    """safetensors, in files of at most SHARD_BYTES with an index, as the hub lays them out."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, weight in hugging_face_weights(decoder):
        if held and held + weight.nbytes > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = weight.detach().cpu().clone(memory_format=torch.contiguous_format)  # parts share storage
        held += weight.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
    total = sum(weight.nbytes for shard in shards for weight in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_tokenizer(tokenizer_json: Path, end_of_text: int, sequence_length: int, folder: Path) -> None:
    text = tokenizer_json.read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    token = next(token["content"] for token in json.loads(text)["added_tokens"] if token["id"] == end_of_text)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token,
            "eos_token": token,
            "model_max_length": sequence_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def _greedy_equal(ours: Decoder, theirs: Any, prompt: Tensor) -> int:
    """Number of greedily generated tokens, all of which must agree; a tie within the tolerance is no disagreement."""
    room = min(GREEDY_TOKENS, ours.config.sequence_length - prompt.shape[1])
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


def _first_difference(ours: Decoder, theirs: Any, sample: Tensor) -> str:
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
