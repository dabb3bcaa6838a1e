"""Hugging Face and GGUF models, in and out, compared with their source."""
