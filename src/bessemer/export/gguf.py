"""GGUF files (weights, settings and tokenizer in one file) for llama.cpp, and Modelfiles for Ollama.

Format: ggml-org/ggml, docs/gguf.md. Names of tensors and keys: the `gguf` package, which llama.cpp's own converter uses.
Modelfile: ollama/ollama, docs/modelfile.md.

llama.cpp knows the pre-tokenizer of each published tokenizer by a name (`tokenizer.ggml.pre`). Other converters find it by a
hash of the whole vocabulary, so they reject every newly trained tokenizer. Here it is found by the split pattern itself
(llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import FREE_OPTIONS, family_of, family_standard
from bessemer.model.huggingface.weights import HubTensor, ParameterReader, hub_tensors
from bessemer.model.layers import rotary_frequencies
from bessemer.model.options import Rope
from bessemer.model.transformer import Transformer
from bessemer.run.files import read_json
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.patterns import GPT2, GPT2_DIGITS_FIRST, GPT4, pattern_of, pre_tokenization

# llama.cpp's architecture for each family that both compute in the same way
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "gpt2": "gpt2",
    "qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe", "dots1": "dots1",
}  # fmt: skip
PERMUTED = ("llama",)  # architectures whose rotary embedding pairs neighbours (2i, 2i + 1), not halves (i, i + K/2)
# Options that a file stores, or whose effect is checked separately
WRITTEN = {"kv_heads", "head_dim", "window", "window_rope_theta", "window_rope_scaling", "experts", "balance"}
# More options that a file of an architecture stores
WRITTEN_BY = {"dots1": {"shared_experts", "dense_layers", "router_normalised", "router_scale"}}
UNTIED = ("olmo2", "dots1")  # architectures that need a separate output matrix
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama_ftype
Q8_0_BLOCK = 32  # values that share a scale; rows of another length are written in F16

Array = npt.NDArray[Any]
# Split patterns and llama.cpp's pre-tokenizer with the same splits, compared on texts of every kind in the tests
PRE_TOKENIZERS = {
    GPT4: "llama-bpe", pattern_of("gpt4", "single"): "qwen2", GPT2: "gpt-2", GPT2_DIGITS_FIRST: "smollm",
}  # fmt: skip
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
IGNORED_NORMALIZERS = (None, {"type": "NFC"})  # these leave composed text unchanged; llama.cpp applies no normalizer
# Chat templates are Jinja in a GGUF and Go templates in a Modelfile. Only ChatML is written to the Modelfile. Without a
# TEMPLATE line, Ollama uses its own version of the template in the GGUF.
PLAIN = "{{ .Prompt }}"
CHATML = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True)
class GgufIds:
    """Special token ids of a GGUF file.

    Attributes:
        framing: Ids around a document.
        ends: Ids that end a text; the first is llama.cpp's eos.
        pad: Padding id; None without one.
    """

    framing: Framing
    ends: tuple[int, ...]
    pad: int | None = None


@dataclass(frozen=True)
class GgufVocabulary:
    """A vocabulary in llama.cpp's terms.

    Attributes:
        tokens: Token of each id.
        kinds: Token type of each id.
        merges: BPE merges as "left right", by rank.
        pre: llama.cpp's name of the pre-tokenizer.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre: str


def architecture_of(config: ModelConfig) -> str:
    """Return llama.cpp's architecture name for a model.

    Raises:
        InputError: llama.cpp does not compute this model, or not in the same way.
    """
    family = family_of(config)

    def problem(why: str) -> InputError:
        known = ", ".join(sorted(ARCHITECTURES))
        return InputError(f"export --to gguf: {why}; use --to hf, or a language model of the families {known}")

    if config.labels or not config.causal:
        raise problem("a classifier is not a language model" if config.labels else "an encoder generates no text")
    if family.name not in ARCHITECTURES:
        raise problem(f"the family {family.name} has no known architecture in llama.cpp")
    architecture, scaling = ARCHITECTURES[family.name], config.rope_scaling
    written = FREE_OPTIONS.union(WRITTEN, WRITTEN_BY.get(architecture, ()))
    for option, standard in family_standard(family, config).items():
        if option not in written and getattr(config, option) != standard:
            raise problem(f"llama.cpp's {architecture} is not supported with {option} = {getattr(config, option)}")
    if any(0 < config.window_of(layer) < config.positions_length for layer in range(config.layers)):
        raise problem(f"llama.cpp's {architecture} does not support this model's sliding windows")
    kinds = ("linear", "llama3") if architecture == "llama" else ("linear",)
    if scaling is not None and scaling.kind not in kinds:
        raise problem(f"llama.cpp's {architecture} is not supported with rope_scaling of kind {scaling.kind}")
    return architecture


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: llama.cpp's name.
        shape: Shape of the values.
        kind: One of the values of TYPES.
        array: Function that returns the values in float32.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    array: Callable[[], Array]

    @property
    def stored(self) -> Array:
        """Values encoded in the tensor's file type."""
        import gguf

        return gguf.quantize(self.array(), gguf.GGMLQuantizationType[self.kind])  # type: ignore[no-any-return]


def write_gguf(
    model: Transformer, value: ParameterReader, vocabulary: GgufVocabulary, ids: GgufIds, name: str, path: Path,
    dtype: str = "float32", licence: str | None = None, chat_template: str | None = None,
) -> int:  # fmt: skip
    """Write a GGUF file tensor by tensor, and return the number of tensors.

    Args:
        model: The model on any device, including the meta device.
        value: Function that returns a parameter's values; called when they are written.
        vocabulary: Vocabulary of the file.
        ids: Special token ids.
        name: Name of the model.
        path: File to write.
        dtype: A key of TYPES for matrices; norms and biases are float32.
        licence: Licence of the model, if known.
        chat_template: Chat template in Jinja.

    Raises:
        BessemerError: A tensor that was read back differs from the one written.
    """
    import gguf

    kind, architecture = TYPES[dtype], architecture_of(model.config)
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {"type": "model", "name": name, "license": licence, "chat_template": chat_template}
    keys["file_type"] = FILE_TYPES[kind]
    keys |= _config_keys(model.config, architecture) | _tokenizer_keys(vocabulary, ids)
    for key, setting in keys.items():
        if setting is not None:
            getattr(writer, f"add_{key}")(setting)
    planned = list(_tensors(model, architecture, lambda name, parameter: parameter.detach(), kind))
    for tensor in planned:
        stored_type = gguf.GGMLQuantizationType[tensor.kind]
        raw = np.dtype({"F32": np.float32, "F16": np.float16}.get(tensor.kind, np.uint8))
        raw_shape = gguf.quant_shape_to_byte_shape(tensor.shape, stored_type) if raw == np.uint8 else tensor.shape
        writer.add_tensor_info(tensor.name, raw_shape, raw, math.prod(raw_shape) * raw.itemsize, stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in _tensors(model, architecture, value, kind):
        writer.write_tensor_data(tensor.stored)
    writer.close()
    _require_written(path, _tensors(model, architecture, value, kind))
    return len(planned)


def _config_keys(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the settings of a model; a key NAME is written by GGUFWriter.add_NAME."""
    import gguf

    keys: dict[str, Any] = {
        "vocab_size": config.vocabulary, "context_length": config.positions_length, "embedding_length": config.width,
        "block_count": config.layers, "feed_forward_length": config.expert_width or config.mlp_width,
        "head_count": config.heads, "head_count_kv": config.kv_heads,
    }  # fmt: skip
    if architecture == "gpt2":
        return keys | {"layer_norm_eps": config.norm_eps}
    keys |= {
        "layer_norm_rms_eps": config.norm_eps, "key_length": config.head_dim, "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim, "rope_freq_base": config.rope_theta,
    }  # fmt: skip
    if config.experts:
        keys |= {"expert_count": config.experts, "expert_used_count": config.experts_per_token,
                 "expert_feed_forward_length": config.expert_width}  # fmt: skip
    if architecture == "dots1":
        keys |= {
            "leading_dense_block_count": config.dense_layers, "feed_forward_length": config.mlp_width,
            "expert_shared_count": config.shared_experts, "expert_weights_scale": config.router_scale,
            "expert_weights_norm": config.router_normalised, "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        }  # fmt: skip
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        keys |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": config.rope_scaling.factor}
    return keys


def _tokenizer_keys(vocabulary: GgufVocabulary, ids: GgufIds) -> dict[str, Any]:
    """Return the settings of a tokenizer; a key NAME is written by GGUFWriter.add_NAME."""
    before, after = ids.framing.before, ids.framing.after
    if len(before) > 1 or len(after) > 1 or (after and after[0] != ids.ends[0]):
        raise InputError(
            f"export --to gguf: the tokenizer adds {list(before)} before and {list(after)} after a text; llama.cpp adds at most "
            "one id before it, and only the end-of-text id after it; use --to hf"
        )
    return {  # "gpt2" means byte-level BPE for any architecture
        "tokenizer_model": "gpt2", "tokenizer_pre": vocabulary.pre, "token_list": vocabulary.tokens,
        "token_types": vocabulary.kinds, "token_merges": vocabulary.merges, "pad_token_id": ids.pad,
        "bos_token_id": before[0] if before else ids.ends[0], "eos_token_id": ids.ends[0],
        "eot_token_id": ids.ends[1] if len(ids.ends) > 1 else None, "add_bos_token": bool(before),
        "add_eos_token": bool(after), "add_space_prefix": False,
    }  # fmt: skip


def _tensors(model: Transformer, architecture: str, value: ParameterReader, kind: str) -> Iterator[GgufTensor]:
    """Yield the tensors of a GGUF file in their order, with matrices in the data type `kind`, one of the values of TYPES.

    `architecture` is llama.cpp's name of the model's architecture, and `value` returns the values of a parameter.
    """
    import gguf

    config = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.layers)

    def array(name: str, tensors: Sequence[HubTensor]) -> Array:
        # Tensors named _exps have the matrices of all experts of a layer.
        stacked = torch.stack([tensor.gather().float() for tensor in tensors])
        values = stacked if "_exps" in name else stacked[0]
        numbers: Array = (values.T.contiguous() if tensors[0].transposed else values).numpy()
        if architecture in PERMUTED and name.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            return _interleaved(numbers, config.heads if "attn_q" in name else config.kv_heads)
        return numbers

    each_expert = re.compile(r"(?<=\.experts)\.\d+")
    for joint, group in groupby(hub_tensors(model, value), lambda tensor: each_expert.sub("", tensor.name)):
        joint = joint.replace("correction_bias", "correction.bias")  # llama.cpp has a module e_score_correction
        name, tensors = names.get_name(joint, try_suffixes=(".weight", ".bias")), list(group)
        if name is None:
            raise BessemerError(f"export --to gguf: llama.cpp's {architecture} has no tensor {joint}")
        shape = tensors[0].shape[::-1] if tensors[0].transposed else tensors[0].shape
        shape = (len(tensors), *shape) if "_exps" in name else shape
        own = GgufTensor(name, shape, _type_of(name, shape, kind), partial(array, name, tensors))
        yield own
        if architecture in UNTIED and config.tie_embeddings and name == "token_embd.weight":
            yield replace(own, name="output.weight")
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        # llama.cpp divides each rotary frequency by these; `rotary_frequencies` applies them directly.
        plain = Rope(config.rope_theta, config.head_dim)
        frequencies = rotary_frequencies(plain, config.positions_length)
        scaled = rotary_frequencies(replace(plain, scaling=config.rope_scaling), config.positions_length)
        divisors = (frequencies / scaled).float().numpy()
        yield GgufTensor("rope_freqs.weight", divisors.shape, "F32", lambda: divisors)


def _interleaved(array: Array, heads: int) -> Array:
    """Reorder the rows of a query or key weight from rotate-half to interleaved RoPE pairs within each head.

    The shape (heads x head size, ...) stays: rows i and i + head size / 2 of a head become neighbours.
    """
    by_half = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(array.shape)


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type of a tensor.

    Vectors stay in F32, and so do learned positions, which llama.cpp adds without conversion, and routers.
    """
    if len(shape) == 1 or name.startswith("position_embd") or "ffn_gate_inp" in name:
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % Q8_0_BLOCK else kind


def _require_written(path: Path, tensors: Iterator[GgufTensor]) -> None:
    """Raise BessemerError unless the file's tensors equal the intended ones byte for byte."""
    import gguf

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in tensors:
        read, stored = written[tensor.name], tensor.stored.view(np.uint8).ravel()
        has_shape = tuple(int(size) for size in read.shape[::-1]) == tensor.shape
        if not has_shape or not np.array_equal(np.asarray(read.data).view(np.uint8).ravel(), stored):
            raise BessemerError(f"export --to gguf: tensor {tensor.name} differs after reading it back")


def vocabulary_of(tokenizer_json: Path, rows: int) -> GgufVocabulary:
    """Return the vocabulary of a tokenizer, padded with unused tokens to the rows of the embedding.

    Args:
        tokenizer_json: The tokenizer's file.
        rows: Number of rows of the embedding.

    Raises:
        InputError: llama.cpp would encode text differently.
    """
    description = read_json(tokenizer_json)
    model, added = description["model"], {token["id"]: token for token in description["added_tokens"]}
    pre = pre_tokenizer(description)
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    ids = range(max(rows, max(tokens) + 1))
    names = [tokens.get(number, f"[PAD{number}]") for number in ids]
    marked = {number: CONTROL if token["special"] else USER_DEFINED for number, token in added.items()}
    kinds = [marked.get(number, NORMAL if number in tokens else UNUSED) for number in ids]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return GgufVocabulary(names, kinds, merges, pre)


def pre_tokenizer(description: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json.

    Args:
        description: Content of tokenizer.json.

    Raises:
        InputError: llama.cpp has no pre-tokenizer that splits text the same way.
    """

    def problem(why: str) -> InputError:
        return InputError(f"export --to gguf: the tokenizer {why}; use --to hf")

    if description["model"].get("type", "BPE") != "BPE" or description["model"].get("byte_fallback"):
        raise problem("is not a byte-level BPE, the only supported kind")
    if description.get("normalizer") not in IGNORED_NORMALIZERS:
        kind = description["normalizer"].get("type")
        raise problem(f"changes text before splitting it (normalizer {kind}), which llama.cpp does not support")
    # Only the split of text into pieces matters here. llama.cpp also matches added tokens that are not special first.
    bare = {**description, "normalizer": None, "added_tokens": [t for t in description["added_tokens"] if t["special"]]}
    shape = pre_tokenization(bare)
    if shape is None or shape.prefix_space:
        raise problem("splits text in a way that llama.cpp does not support")
    if shape.regex not in PRE_TOKENIZERS:
        raise problem(
            "splits text by a pattern unknown to llama.cpp, which supports tokenizer.pattern gpt2, and gpt4 or llama3 with "
            'digits "groups-of-three" or "single" and white_space "runs"'
        )
    return PRE_TOKENIZERS[shape.regex]


def modelfile(
    file: str, positions: int, stops: Sequence[str], generation: Mapping[str, Any], chat_template: str | None,
    system: str | None = None,
) -> str:  # fmt: skip
    """Return the Modelfile for a GGUF file in the same folder.

    Args:
        file: Name of the GGUF file.
        positions: Context length in tokens.
        stops: Texts that end a reply.
        generation: Content of generation_config.json.
        chat_template: Chat template in Jinja; None for a model that continues text.
        system: Default system message.
    """
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {positions}"]
    values = {name: generation.get(theirs) for theirs, name in PARAMETERS.items()}
    lines += [f"PARAMETER {name} {value}" for name, value in values.items() if value is not None]
    template = PLAIN if chat_template is None else CHATML if "<|im_start|>" in chat_template else None
    texts = {"TEMPLATE": template, "SYSTEM": system}
    lines += [f'{key} """{text}"""' for key, text in texts.items() if text is not None]
    if template == CHATML:
        stops = [*stops, "<|im_end|>"]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in dict.fromkeys(stops)]
    return "\n".join(lines) + "\n"
