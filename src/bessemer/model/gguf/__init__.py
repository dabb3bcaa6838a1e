"""GGUF, the file that llama.cpp and what is built on it read: weights, settings and tokenizer in one."""
