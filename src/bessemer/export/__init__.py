"""Export to the Hugging Face and GGUF formats and import of Hugging Face models, verified against their source."""
