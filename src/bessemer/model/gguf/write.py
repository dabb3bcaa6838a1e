"""A model as a GGUF file, tensor by tensor: names and settings as llama.cpp's architectures have them.

Format: ggml-org/ggml, docs/gguf.md; names of tensors and keys: the `gguf` package, which llama.cpp's own converter uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bessemer.errors import BessemerError, InputError
from bessemer.model.config import ModelConfig, Rope
from bessemer.model.gguf.vocabulary import Vocabulary
from bessemer.model.huggingface.config import family_of
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import Part, Value, parts
from bessemer.model.rotary import frequencies
from bessemer.model.transformer import Transformer
from bessemer.tokens.pieces import Framing

# Families to llama.cpp's architectures, where both compute the same.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmo2": "olmo2",
    "gpt2": "gpt2",
}
# Options that may differ from the family's own: dimensions, and what is written or checked below.
FREE = (
    "vocabulary", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "sequence_length", "max_positions",
    "norm_eps", "tie_embeddings", "rope_theta", "rope_scaling", "window", "global_every", "global_last", "global_layers",
    "window_rope_theta", "window_rope_scaling", "labels", "pooling", "family",
)  # fmt: skip
PERMUTED = ("llama",)  # architectures whose rotary positions turn neighbours (2i, 2i + 1), not halves (i, i + K/2)
UNTIED = ("olmo2",)  # architectures that need an output matrix of their own
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama_ftype
Q8_0_BLOCK = 32  # values that share a scale; rows of another length are written in F16

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ids:
    """What llama.cpp is told about ids. ends: ids that end a text, the first is its eos; pad: None where there is none."""

    framing: Framing
    ends: tuple[int, ...]
    pad: int | None = None


@dataclass(frozen=True)
class Described:
    """What else stands in the file: a name, a licence, a chat template (Jinja)."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)


def architecture_of(config: ModelConfig) -> str:
    """llama.cpp's name for a model. Raises InputError, with the reason, for one that it does not compute."""
    family = family_of(config)

    def refused(why: str) -> InputError:
        known = ", ".join(sorted(ARCHITECTURES))
        return InputError(
            f"export --to gguf: {why}; GGUF is written for language models of the families {known}; use --to hf"
        )

    if config.labels or not config.causal:
        raise refused("a classifier is not a language model" if config.labels else "an encoder does not write text")
    if family not in ARCHITECTURES:
        raise refused(f"the family {family} has no architecture in llama.cpp that is known here")
    standard = {item.name: item.default for item in fields(ModelConfig)} | FAMILIES[family].options
    for item in fields(ModelConfig):
        if item.name not in FREE and getattr(config, item.name) != standard[item.name]:
            raise refused(
                f"llama.cpp's {ARCHITECTURES[family]} is not known here with {item.name} = {getattr(config, item.name)}"
            )
    if any(0 < config.window_of(layer) < config.positions_length for layer in range(config.layers)):
        raise refused(f"llama.cpp's {ARCHITECTURES[family]} has no sliding windows, this model has")
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and ARCHITECTURES[family] != "llama":
        raise refused(f"llama.cpp's {ARCHITECTURES[family]} has no rope_scaling of kind llama3")
    if scaling is not None and scaling.kind not in ("llama3", "linear"):
        raise refused(f"rope_scaling of kind {scaling.kind} is not written")
    return ARCHITECTURES[family]


def write(
    model: Transformer,
    value: Value,
    vocabulary: Vocabulary,
    ids: Ids,
    described: Described,
    path: Path,
    dtype: str = "float32",
) -> int:
    """Write the file; returns its number of tensors.

    model: on any device, the meta device too; value: gives each parameter's values when they are written; dtype: of TYPES,
    for matrices, norms and biases are float32. Raises BessemerError when a tensor is not what was written when read back.
    """
    import gguf

    config, kind = model.config, TYPES[dtype]
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    _settings(writer, config, architecture, described)
    writer.add_file_type(FILE_TYPES[kind])
    _tokenizer(writer, vocabulary, ids)
    planned = [(name, shape, _type_of(name, shape, kind)) for name, shape in _shapes(model, architecture)]
    for name, shape, stored in planned:
        stored_type = gguf.GGMLQuantizationType[stored]
        stored_shape = gguf.quant_shape_to_byte_shape(shape, stored_type)
        raw = np.dtype({"F32": np.float32, "F16": np.float16}.get(stored, np.uint8))
        num_bytes = math.prod(shape) * raw.itemsize if raw != np.uint8 else math.prod(stored_shape)
        writer.add_tensor_info(name, shape if raw != np.uint8 else stored_shape, raw, num_bytes, stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, _, stored), (again, array) in zip(planned, _arrays(model, architecture, value), strict=True):
        assert name == again
        writer.write_tensor_data(_stored(array, stored))
    writer.close()
    _read_back(path, planned, _arrays(model, architecture, value))
    return len(planned)


def _settings(writer: Any, config: ModelConfig, architecture: str, described: Described) -> None:
    writer.add_type("model")
    writer.add_name(described.name)
    if "license" in described.settings:
        writer.add_license(described.settings["license"])
    if "chat_template" in described.settings:
        writer.add_chat_template(described.settings["chat_template"])
    writer.add_vocab_size(config.vocabulary)
    writer.add_context_length(config.positions_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def _tokenizer(writer: Any, vocabulary: Vocabulary, ids: Ids) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE, whatever the architecture
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    before, after = ids.framing.before, ids.framing.after
    if len(before) > 1 or len(after) > 1 or (after and after[0] != ids.ends[0]):
        raise InputError(
            f"export --to gguf: the tokenizer puts the ids {list(before)} before and {list(after)} after a text; llama.cpp puts "
            "at most one before it, and the one that ends a text after it"
        )
    writer.add_bos_token_id(before[0] if before else ids.ends[0])
    writer.add_eos_token_id(ids.ends[0])
    if len(ids.ends) > 1:
        writer.add_eot_token_id(ids.ends[1])
    if ids.pad is not None:
        writer.add_pad_token_id(ids.pad)
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))
    writer.add_add_space_prefix(False)


def _shapes(model: Transformer, architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, part in _named(model, architecture, lambda parameter: parameter.detach()):
        shape = part.shape[::-1] if part.transposed else part.shape
        yield name, shape
    if model.config.rope_scaling is not None and model.config.rope_scaling.kind == "llama3":
        yield "rope_freqs.weight", (model.config.head_dim // 2,)


def _arrays(model: Transformer, architecture: str, value: Value) -> Iterator[tuple[str, Array]]:
    """The tensors in float32, in the order of `_shapes`."""
    for name, part in _named(model, architecture, value):
        tensor: Tensor = part.theirs().float()
        array = (tensor.T.contiguous() if part.transposed else tensor).numpy()
        if architecture in PERMUTED and name.rpartition(".")[0].endswith(("attn_q", "attn_k")):
            heads = model.config.heads if "attn_q" in name else model.config.kv_heads
            array = _turned(array, heads)
        yield name, array
    if model.config.rope_scaling is not None and model.config.rope_scaling.kind == "llama3":
        yield "rope_freqs.weight", _frequency_factors(model.config)


def _named(model: Transformer, architecture: str, value: Value) -> Iterator[tuple[str, Part]]:
    """Our parts under llama.cpp's names."""
    import gguf

    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.layers)
    for part in parts(model, value):
        name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BessemerError(f"export --to gguf: llama.cpp's {architecture} has no tensor {part.name}")
        yield name, part
        if architecture in UNTIED and model.config.tie_embeddings and name == "token_embd.weight":
            yield "output.weight", part


def _turned(array: Array, heads: int) -> Array:
    """Rows of queries or keys (heads K, ...) reordered from halves to neighbours, within each head."""
    by_half = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(array.shape)


def _frequency_factors(config: ModelConfig) -> Array:
    """What llama.cpp divides each rotary frequency by, for the kind llama3 (model/rotary.py has the same, multiplied out)."""
    plain = Rope(config.rope_theta, config.head_dim)
    scaled = frequencies(replace(plain, scaling=config.rope_scaling), config.positions_length)
    factors: Array = (frequencies(plain, config.positions_length) / scaled).float().numpy()
    return factors


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Vectors, and the learned positions, which llama.cpp adds as they are, stay in F32."""
    if len(shape) == 1 or name.startswith("position_embd"):
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % Q8_0_BLOCK else kind


def _stored(array: Array, kind: str) -> Array:
    import gguf

    if kind == "F32":
        return array
    if kind == "F16":
        return array.astype(np.float16)
    stored: Array = gguf.quantize(array, gguf.GGMLQuantizationType[kind])
    return stored


def _read_back(
    path: Path, planned: list[tuple[str, tuple[int, ...], str]], arrays: Iterator[tuple[str, Array]]
) -> None:
    """Compare the file's tensors, byte by byte, with what was to be written."""
    import gguf

    there = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for (name, shape, kind), (_, array) in zip(planned, arrays, strict=True):
        found = there.pop(name, None)
        equal = (
            found is not None
            and tuple(int(size) for size in found.shape[::-1]) == shape
            and np.array_equal(
                np.asarray(found.data).view(np.uint8).ravel(), _stored(array, kind).view(np.uint8).ravel()
            )
        )
        if not equal:
            raise BessemerError(f"export --to gguf: tensor {name} is not the same after reading it back")
    if there:
        raise BessemerError(f"export --to gguf: the file has a tensor that was not written: {next(iter(there))}")
