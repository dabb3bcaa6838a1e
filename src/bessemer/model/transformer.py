"""The transformer: blocks of attention and MLP between an embedding and a head, and its initial weights.

One implementation covers decoders and encoders; its options (`ModelConfig`) include the architectures that `transformers`
calls Llama, Gemma, BERT and others (huggingface/families.toml). Weights that share an input are one joint parameter, so
that they are one matmul. Its leading dimensions separate the weights, so that they can still be sharded by head, decayed
and exported one by one.

Shapes: B sequences, T tokens, D width, H query heads, G key/value heads, R = H / G, K width of a head, F hidden width, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor, nn

from bessemer.common.hashing import key_of
from bessemer.model import casts
from bessemer.model.attention import Attention, LayerKVCache
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.feed_forward import FeedForward
from bessemer.model.layers import ClassificationHead, LanguageHead, LinearFunction, norm, rotary_cos_sin
from bessemer.model.mixture_of_experts import MixtureOfExperts


class Block(nn.Module):
    """A transformer block: attention, then MLP, each added to the residual stream.

    The norm is before the sublayer (x + f(norm(x))), after it (x + norm(f(x)), OLMo 2), both (Gemma 2), or after the sum
    (norm(x + f(x)), BERT).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        has_norm = config.first_norm or layer > 0
        self.attention_norm = norm(config) if has_norm else nn.Identity()
        self.attention = Attention(config)
        self.mlp_norm = norm(config)
        self.mlp = MixtureOfExperts(config) if layer >= config.layers - config.mixture_layers else FeedForward(config)
        self.norm_position, self.inner_dropout = config.norm_position, config.inner_dropout
        if config.norm_position == "both":
            self.attention_output_norm, self.mlp_output_norm = norm(config), norm(config)

    def forward(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None, scope: AttentionScope, cache: LayerKVCache | None = None,
        masks: DropoutMasks | None = None,
    ) -> Tensor:  # fmt: skip
        def add(x_BTD: Tensor, site: Literal["attention", "mlp"], sublayer: Callable[[Tensor], Tensor]) -> Tensor:
            sublayer_norm: nn.Module = getattr(self, f"{site}_norm")
            y_BTD = sublayer(sublayer_norm(x_BTD) if self.norm_position in ("input", "both") else x_BTD)
            if self.norm_position == "output":
                y_BTD = sublayer_norm(y_BTD)
            elif self.norm_position == "both":
                y_BTD = getattr(self, f"{site}_output_norm")(y_BTD)
            if masks is not None and not (self.inner_dropout and site == "mlp"):
                y_BTD = masks.stream(y_BTD, site, masks.rates.attention if self.inner_dropout else masks.rates.hidden)
            x_BTD = x_BTD + y_BTD
            return sublayer_norm(x_BTD) if self.norm_position == "residual" else x_BTD

        x_BTD = add(x_BTD, "attention", lambda x_BTD: self.attention(x_BTD, rotation, scope, cache, masks))
        return add(x_BTD, "mlp", lambda x_BTD: self.mlp(x_BTD, masks if self.inner_dropout else None))


class Transformer(nn.Module):
    """A transformer from token ids to hidden states.

    Callers apply the head, because training computes logits in chunks. The model has `head` (a LanguageHead), or
    `classifier` if the configuration has labels. distributed/pipeline.py and distributed/tensor.py list its modules by
    name.
    """

    head: LanguageHead
    classifier: ClassificationHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.position_rows, config.width)
        if config.token_types:
            self.type_embedding = Embedding(config.token_types, config.width)
        self.embedding_norm = norm(config) if config.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = norm(config) if config.norm_position != "residual" else nn.Identity()
        if config.labels:
            self.classifier = ClassificationHead(config)
        else:
            self.head = LanguageHead(config)
            if config.tie_embeddings:
                self.head.tie(self.embedding)
        layers, causal, cap = range(config.layers), config.causal, config.attention_soft_cap
        scale = float(config.query_scalar**-0.5) if config.query_scalar else None  # None: 1 / sqrt(head_dim)
        self.specs = [AttentionSpec(causal, config.window_of(n), cap, scale) for n in layers]
        self.ropes = [config.rope_of(layer) for layer in layers]

    def forward(
        self, tokens_BT: Tensor, documents: Documents | None = None, cache: list[LayerKVCache] | None = None,
        masks: DropoutMasks | None = None, x_BTD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the hidden states after the final norm, (B, T, D).

        A stage of a pipeline lacks some modules, which are None. Without the embedding it continues from `x_BTD`, and
        without the final norm it returns the residual stream.

        Args:
            tokens_BT: Token ids.
            documents: The documents of packed sequences; None if each row is one document.
            cache: Keys and values of each layer, which `tokens_BT` continue.
            masks: Dropout masks for training; None for no dropout.
            x_BTD: The residual stream of the previous stage.
        """
        (num_tokens, device), past = (tokens_BT.shape[1], tokens_BT.device), 0 if cache is None else cache[0].length
        whole = past + num_tokens if documents is None else documents.length
        # Position of each token in its document, (T,) or (B, T).
        positions = torch.arange(past, whole, device=device) if documents is None else documents.position_BT
        if self.embedding is not None:
            x_BTD = self.embed(tokens_BT, positions, masks)
        assert x_BTD is not None, "a stage without an embedding needs the previous stage's hidden states"
        scopes = {spec: AttentionScope.build(spec, documents, num_tokens, device) for spec in dict.fromkeys(self.specs)}
        rotations = {
            rope: None if rope is None else rotary_cos_sin(positions, rope, whole, x_BTD.dtype)
            for rope in dict.fromkeys(self.ropes)
        }
        for layer, block in enumerate(self.blocks):
            if block is not None:  # blocks of other stages are None
                layer_cache = None if cache is None else cache[layer]
                layer_masks = None if masks is None else masks.for_layer(layer)
                x_BTD = block(x_BTD, rotations[self.ropes[layer]], scopes[self.specs[layer]], layer_cache, layer_masks)
        return x_BTD if self.norm is None else self.norm(x_BTD)  # type: ignore[no-any-return]

    def use_linear(self, function: LinearFunction) -> None:
        """Set the function that computes the blocks' matmuls with weights, instead of F.linear."""
        for block in filter(None, self.blocks):
            for module in block.modules():
                if hasattr(module, "project"):
                    module.project = function  # type: ignore[assignment]

    def logits(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the logits of every position, (B, T, V), for evaluation of short texts."""
        return self.head.logits(self(tokens_BT, documents))

    def embed(self, tokens_BT: Tensor, positions: Tensor, masks: DropoutMasks | None = None) -> Tensor:
        """Return the sum of token, position and type embeddings, normalised. All tokens have type 0."""
        x_BTD = self.embedding(tokens_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.width)
        if self.config.token_types:
            x_BTD = x_BTD + self.type_embedding.weight[0].to(x_BTD.dtype)
        if self.config.positions == "learned":
            rows = positions if self.config.position_padding is None else self._padded_rows(tokens_BT, positions)
            x_BTD = x_BTD + self.position_embedding(rows).to(x_BTD.dtype)
        embedded: Tensor = self.embedding_norm(x_BTD)
        return embedded if masks is None else masks.stream(embedded, "embedding", masks.rates.hidden)

    def _padded_rows(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Return RoBERTa's position ids, (B, T), which give padding the row `padding` and skip it when counting.

        Other tokens count from padding + 1. `positions` is each token's position in its document, (T,) or (B, T).
        """
        padding = self.config.position_padding
        assert padding is not None
        is_padding_BT = tokens_BT == padding
        index_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        before_BT = is_padding_BT.cumsum(dim=1) - is_padding_BT.long()
        earlier_BT = before_BT.gather(1, (index_T - positions).expand_as(tokens_BT))  # before the document
        return torch.where(is_padding_BT, padding, positions - (before_BT - earlier_BT) + padding + 1)


# Initial weights are a pure function of (config, seed), the same for every device and layout.

EMBEDDING_STD = 1.0  # for an untied embedding: the residual stream starts at the scale at which the norms keep it
TIED_STD = 0.02  # for a tied matrix, because the logits scale with it (GPT-2)


def build_model(config: ModelConfig, seed: int) -> Transformer:
    """Build a model with its initial weights, in fp32 on the CPU."""
    model = meta_model(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # one core draws 160 million values per second
        tensors = pool.map(lambda name: initial_tensor(name, shapes[name], config, seed), shapes)
        model.load_state_dict(dict(zip(shapes, tensors, strict=True)), strict=False, assign=True)
    if config.is_tied:
        model.head.tie(model.embedding)
    return model


def meta_model(config: ModelConfig) -> Transformer:
    """Build a model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config)


class Embedding(nn.Embedding):
    """An embedding whose gradient may bypass autograd (model/casts.py).

    It draws no initial values, because `initial_tensor` does, and drawing on the meta device would load torch's compiler,
    which takes a second.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width))

    def forward(self, input: Tensor) -> Tensor:
        return casts.look_up(input, self.weight)


def initial_tensor(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of one full tensor of the model, in fp32 on the CPU.

    Each tensor has a generator seeded by its name, so its values do not depend on the presence of other tensors.

    Parameters of blocks start at the value that their sublayer declares, if any. Norms start at one (zero if
    zero-centred) and biases at zero. Matrices are normal with the standard deviation 1/sqrt(fan-in), which preserves the
    scale of activations. The output matrix is smaller by another factor of 1/sqrt(width), so that the first prediction
    is nearly uniform.
    """
    facts = config.parameter_facts(name)
    if facts is not None and facts.initial is not None:
        return torch.full(shape, facts.initial)
    if name.endswith("bias") or len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else config.norm_start)
    if name == "embedding.weight":
        std = TIED_STD if config.tie_embeddings else EMBEDDING_STD
        if config.scale_embedding and not config.tie_embeddings:
            std /= math.sqrt(config.width)
    elif name in ("position_embedding.weight", "type_embedding.weight"):
        std = TIED_STD
    elif name in ("head.weight", "classifier.weight"):
        std = 1.0 / config.width
    else:
        std = 1.0 / math.sqrt(shape[-1])
    generator = torch.Generator("cpu").manual_seed(key_of(seed, name) >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
