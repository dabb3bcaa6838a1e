"""What a family of models is: options, names of keys in config.json, names of tensors. No torch: plans read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.rules import ConfigRule, Values
from bessemer.model.huggingface.settings import ForeignConfig

Pairs = tuple[tuple[str, str], ...]

# Keys of config.json that every family of `transformers` may have; the tests compare them with the installed version.
UNDERSTOOD = {"model_type", "architectures", "id2label", "num_labels"}
# A value other than this would change what is computed, and we have no option for it.
FIXED: dict[str, Any] = {
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "pruned_heads": {}, "per_layer_config": {}, "partial_rotary_factor": 1.0, "position_embedding_type": "absolute",
}  # fmt: skip
# Read by code that all families of `transformers` share, though most of their configurations do not have them.
READ_ANYWHERE = {"is_causal", "attention_chunk_size", "embedding_size", "hidden_dropout", "fusion_config"}
# Keys that change nothing in what is computed.
HARMLESS = frozenset((
    # how and where it was saved, initial weights, code that transformers too runs only when told to trust it
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash", "initializer_range",
    "auto_map",
    # what a call of transformers returns
    "output_hidden_states", "output_attentions", "return_dict", "return_dict_in_generate", "output_scores", "use_cache",
    "use_return_dict", "problem_type", "label2id", "finetuning_task", "task_specific_params", "tie_last_hidden_states",
    "keys_to_ignore_at_inference", "cross_attention_hidden_size",
    # generation: generation_config.json and the caller say it
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "top_k",
    "top_p", "min_p", "typical_p", "diversity_penalty", "temperature", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "remove_invalid_values", "cache_implementation",
    # the tokenizer's
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix",
    # kernels and memory
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "chunk_size_feed_forward",
    "gradient_checkpointing", "use_flash_attn", "use_flash_attention_2", "torchscript", "use_bfloat16", "tf_legacy_loss",
))  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """Names of modules, `transformers`' to ours, in the order in which an export writes them.

    A module stands for its weight and its bias, those of them that our model has: a module that this configuration lacks
    gives none, and a name may stand twice with the alternatives. Ours is a path such as "attention.out", one parameter
    such as "head.bias", or a view of a joint parameter ("attention.qkv:q", "mlp.gate_up:up"; without a view where theirs
    is joint too: all queries, all keys, all values).

    outer: modules outside the blocks; block: modules of block {} under `prefix`; transposed: names of theirs in a block
    whose weight is (in, out); base: prefix that a folder saved from the headless model leaves out; unread: prefixes of
    tensors that a folder may hold and no model of ours reads (heads of other tasks).
    """

    outer: Pairs
    prefix: str
    block: Pairs
    transposed: tuple[str, ...] = ()
    base: str = "model."
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A family of `transformers`, as data. `docs/models.md` says how to add one.

    name: in recipes; model_type: in config.json; title: as people write it; summary: norm, positions, MLP and what else,
    for the table of the docs; architecture, classifier: class names of `transformers`;
    options: where it differs from ModelConfig's defaults; keys: our options to the keys of config.json, both ways;
    defaults: of our options, what `transformers` takes where a config.json leaves the key out (the tests compare them
    with its class); a key without a default is required, unless the value follows from others (kv_heads, head_dim);
    rules: how further options are said; fixed: keys for which we have no option: another value is refused, and this one
    is written; dropout: keys of dropout, each with the rate of [train.dropout] that it is written from;
    harmless: keys that change nothing in what is computed; poolings: of a classifier;
    token_keys: keys that an export fills with the end-of-text token;
    examples: name to changes of `options`, each compared with `transformers` both ways in docs/parity.md.
    """

    name: str
    model_type: str
    title: str
    summary: tuple[str, str, str, str]
    architecture: str
    classifier: str
    options: Values
    keys: Mapping[str, str]
    defaults: Values
    rules: tuple[ConfigRule, ...]
    tensors: Tensors
    fixed: Values = field(default_factory=dict)
    dropout: Mapping[str, Literal["hidden", "attention", "classifier"]] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ("last",)
    token_keys: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id")
    examples: Mapping[str, Values] = field(default_factory=dict)

    @property
    def reads(self) -> set[str]:
        """The keys that the rules read."""
        return {key for rule in self.rules for key in rule.keys}

    @property
    def understood(self) -> set[str]:
        """The keys of config.json that are read or compared with the only value that is supported."""
        return {*self.keys.values(), *self.fixed, *self.dropout, *self.reads, *self.token_keys, *UNDERSTOOD}

    @property
    def known(self) -> set[str]:
        """`understood`, and the keys that change nothing in what is computed."""
        return self.understood | {*self.harmless, *HARMLESS, *FIXED}

    @property
    def free(self) -> set[str]:
        """Options that it takes any value of, but for its obstacles."""
        return {*self.keys, *(option for rule in self.rules for option in rule.free)}

    def read(self, settings: ForeignConfig, values: Values) -> Values:
        """The options that the rules read. values: those that `keys` gave."""
        options: Values = {}
        for rule in self.rules:
            options |= rule.read(settings, values | options)
        return options

    def write(self, config: ModelConfig) -> Values:
        """The inverse."""
        return {key: value for rule in self.rules for key, value in rule.write(config).items()}

    def obstacles(self, config: ModelConfig) -> list[str]:
        """What of a configuration the rules cannot express."""
        return [obstacle for rule in self.rules for obstacle in rule.obstacles(config)]
