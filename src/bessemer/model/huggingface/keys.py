"""Keys of config.json that every family of `transformers` may have.

The tests compare these lists with the installed `transformers`: a key that a configuration class of a family writes is
in one of them or in the family's own.
"""

from __future__ import annotations

from typing import Any

# Read by ourselves, whatever the family.
UNDERSTOOD = {"model_type", "architectures", "id2label", "num_labels"}

# A value other than this would change what is computed, and we have no option for it.
FIXED: dict[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "per_layer_config": {},
    "partial_rotary_factor": 1.0,
    "position_embedding_type": "absolute",
}

# Read by code that all families of `transformers` share, though most of their configurations do not have them.
READ_ANYWHERE = {"is_causal", "attention_chunk_size", "embedding_size", "hidden_dropout", "fusion_config"}

_SAVED = "how and where it was saved"
_RETURNED = "what a call of transformers returns"
_GENERATION = "a habit of generation; generation_config.json and the caller say it"
_TOKENS = "the tokenizer's and the caller's"
_KERNELS = "a choice of kernel or of memory, not of what is computed"

HARMLESS: dict[str, str] = {
    **dict.fromkeys((
        "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash",
    ), _SAVED),
    **dict.fromkeys((
        "output_hidden_states", "output_attentions", "return_dict", "return_dict_in_generate", "output_scores",
        "use_cache", "use_return_dict", "problem_type", "label2id", "finetuning_task", "task_specific_params",
        "keys_to_ignore_at_inference", "tie_last_hidden_states", "cross_attention_hidden_size",
    ), _RETURNED),
    **dict.fromkeys((
        "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
        "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
        "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "cache_implementation",
    ), _GENERATION),
    **dict.fromkeys((
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
        "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
    ), _TOKENS),
    **dict.fromkeys((
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation",
        "_experts_implementation", "_attn_implementation_internal", "_experts_implementation_internal",
        "chunk_size_feed_forward", "gradient_checkpointing", "use_flash_attn", "use_flash_attention_2", "torchscript",
        "use_bfloat16", "tf_legacy_loss",
    ), _KERNELS),
    "initializer_range": "initial weights",
    "auto_map": "code of the repository, which transformers too leaves alone unless it is told to trust it",
}  # fmt: skip
