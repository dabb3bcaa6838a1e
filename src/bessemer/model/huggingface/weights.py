"""Our parameters under the names of `transformers`: one list of views, read on export and written on import.

Shapes: G key/value heads, R query heads for each, K width of a head, D width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.model.huggingface.config import family_of
from bessemer.model.transformer import Attention, Block, Transformer


@dataclass(frozen=True)
class Part:
    """A view of one of our tensors that `transformers` has as a tensor of its own.

    matrix: theirs has two dimensions, ours may have more before the last; transposed: theirs is (in, out), as GPT-2's.
    """

    name: str
    view: Tensor
    matrix: bool
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        if not self.matrix:
            return (self.view.numel(),)
        rows, columns = self.view.shape[:-1].numel(), self.view.shape[-1]
        return (columns, rows) if self.transposed else (rows, columns)

    def theirs(self) -> Tensor:
        """Their tensor, copied out of ours."""
        flat = self.view.reshape(self.shape[::-1] if self.transposed else self.shape)
        return (flat.T if self.transposed else flat).clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def take(self, theirs: Tensor) -> None:
        """Write their tensor into ours. Its shape has been checked."""
        self.view.copy_((theirs.T if self.transposed else theirs).reshape(self.view.shape))


Value = Callable[[Tensor], Tensor]


def parts(model: Transformer, value: Value = lambda parameter: parameter.detach()) -> Iterator[Part]:
    """Every tensor of `transformers`' model of this family as a view of ours; a tied matrix stands once.

    value: what of each parameter is meant: itself, or its gradient.
    """
    family = family_of(model.config)
    named = {"gpt2": _gpt2, "bert": _bert, "modernbert": _modernbert}.get(family, _llama)
    for name, tensor, transposed, *_ in named(model, value):
        matrix = tensor.dim() >= 2 and not name.endswith("bias")
        yield Part(name, tensor, matrix, transposed)


Named = Iterator[tuple[str, Tensor, bool]]


def _qkv(attention: Attention, of: Value, bias: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (G, R, K, D), keys and values (G, 1, K, D); biases without the last dimension."""
    joined = attention.qkv_bias if bias else attention.qkv
    assert joined is not None
    q, k, v = torch.split(of(joined), [attention.queries, 1, 1], dim=1)
    return q, k, v


def _module(name: str, module: nn.Module, of: Value, transposed: bool = False) -> Named:
    """Weight and bias of a linear layer, a norm or an embedding."""
    yield f"{name}.weight", of(module.weight), transposed  # type: ignore[arg-type]
    if getattr(module, "bias", None) is not None:
        yield f"{name}.bias", of(module.bias), False  # type: ignore[arg-type]


def _llama(model: Transformer, of: Value) -> Named:
    config = model.config
    before_output = config.norm_position == "output"
    names = ("post_attention_layernorm", "post_feedforward_layernorm") if before_output else (
        "input_layernorm", "post_attention_layernorm")  # fmt: skip
    yield from _module("model.embed_tokens", model.embedding, of)
    yield from _module("model.norm", model.norm, of)
    if config.labels:
        yield "score.weight", of(model.classifier.weight), False
    elif not config.tie_embeddings:
        yield "lm_head.weight", of(model.head.weight), False
    for number, block in _blocks(model):
        attention, at = block.attention, f"model.layers.{number}"
        for letter, tensor in zip("qkv", _qkv(attention, of), strict=True):
            yield f"{at}.self_attn.{letter}_proj.weight", tensor, False
        yield from _module(f"{at}.self_attn.o_proj", attention.out, of)
        if config.qk_norm != "none":
            yield from _module(f"{at}.self_attn.q_norm", attention.q_norm, of)
            yield from _module(f"{at}.self_attn.k_norm", attention.k_norm, of)
        gate, up = of(_gate_up(block))
        yield f"{at}.mlp.gate_proj.weight", gate, False
        yield f"{at}.mlp.up_proj.weight", up, False
        yield from _module(f"{at}.mlp.down_proj", block.mlp.down, of)  # type: ignore[arg-type]
        yield from _module(f"{at}.{names[0]}", block.attention_norm, of)
        yield from _module(f"{at}.{names[1]}", block.mlp_norm, of)


def _gpt2(model: Transformer, of: Value) -> Named:
    yield from _module("transformer.wte", model.embedding, of)
    yield from _module("transformer.wpe", model.position_embedding, of)
    yield from _module("transformer.ln_f", model.norm, of)
    if model.config.labels:
        yield "score.weight", of(model.classifier.weight), False
    elif not model.config.tie_embeddings:
        yield "lm_head.weight", of(model.head.weight), False
    for number, block in _blocks(model):
        attention, at = block.attention, f"transformer.h.{number}"
        assert attention.qkv_bias is not None
        # One key head for each query head: (G, 3, K, D) with the three outermost is their order.
        yield f"{at}.attn.c_attn.weight", of(attention.qkv).transpose(0, 1), True
        yield f"{at}.attn.c_attn.bias", of(attention.qkv_bias).transpose(0, 1), False
        yield from _module(f"{at}.attn.c_proj", attention.out, of, transposed=True)
        yield from _module(f"{at}.mlp.c_fc", block.mlp.up, of, transposed=True)  # type: ignore[arg-type]
        yield from _module(f"{at}.mlp.c_proj", block.mlp.down, of, transposed=True)  # type: ignore[arg-type]
        yield from _module(f"{at}.ln_1", block.attention_norm, of)
        yield from _module(f"{at}.ln_2", block.mlp_norm, of)


def _bert(model: Transformer, of: Value) -> Named:
    for name, module in (("word", model.embedding), ("position", model.position_embedding),
                         ("token_type", model.type_embedding)):  # fmt: skip
        yield from _module(f"bert.embeddings.{name}_embeddings", module, of)
    yield from _module("bert.embeddings.LayerNorm", model.embedding_norm, of)
    if model.config.labels:
        yield from _module("bert.pooler.dense", model.classifier.transform.dense, of)  # type: ignore[arg-type]
        yield from _module("classifier", model.classifier, of)
    else:
        head = model.head
        assert head.bias is not None
        yield from _module("cls.predictions.transform.dense", head.transform.dense, of)  # type: ignore[arg-type]
        yield from _module("cls.predictions.transform.LayerNorm", head.transform.norm, of)  # type: ignore[arg-type]
        yield "cls.predictions.bias", of(head.bias), False
        if not model.config.tie_embeddings:
            yield "cls.predictions.decoder.weight", of(head.weight), False
    for number, block in _blocks(model):
        attention, at = block.attention, f"bert.encoder.layer.{number}"
        tensors = zip(("query", "key", "value"), _qkv(attention, of), _qkv(attention, of, bias=True), strict=True)
        for name, weight, bias in tensors:
            yield f"{at}.attention.self.{name}.weight", weight, False
            yield f"{at}.attention.self.{name}.bias", bias, False
        yield from _module(f"{at}.attention.output.dense", attention.out, of)
        yield from _module(f"{at}.attention.output.LayerNorm", block.attention_norm, of)
        yield from _module(f"{at}.intermediate.dense", block.mlp.up, of)  # type: ignore[arg-type]
        yield from _module(f"{at}.output.dense", block.mlp.down, of)  # type: ignore[arg-type]
        yield from _module(f"{at}.output.LayerNorm", block.mlp_norm, of)


def _modernbert(model: Transformer, of: Value) -> Named:
    yield from _module("model.embeddings.tok_embeddings", model.embedding, of)
    yield from _module("model.embeddings.norm", model.embedding_norm, of)
    yield from _module("model.final_norm", model.norm, of)
    head: Any = model.classifier if model.config.labels else model.head
    yield from _module("head.dense", head.transform.dense, of)
    yield from _module("head.norm", head.transform.norm, of)
    if model.config.labels:
        yield from _module("classifier", head, of)
    else:
        yield "decoder.bias", of(head.bias), False
        if not model.config.tie_embeddings:
            yield "decoder.weight", of(head.weight), False
    for number, block in _blocks(model):
        at = f"model.layers.{number}"
        yield f"{at}.attn.Wqkv.weight", of(block.attention.qkv).transpose(0, 1), False
        yield from _module(f"{at}.attn.Wo", block.attention.out, of)
        yield f"{at}.mlp.Wi.weight", of(_gate_up(block)), False
        yield from _module(f"{at}.mlp.Wo", block.mlp.down, of)  # type: ignore[arg-type]
        if number or model.config.first_norm:
            yield from _module(f"{at}.attn_norm", block.attention_norm, of)
        yield from _module(f"{at}.mlp_norm", block.mlp_norm, of)


def _blocks(model: Transformer) -> Iterator[tuple[int, Block]]:
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        yield number, block


def _gate_up(block: Block) -> Tensor:
    gate_up = block.mlp.gate_up
    assert isinstance(gate_up, Tensor)
    return gate_up
