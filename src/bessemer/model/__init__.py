"""The transformer: its dimensions, its blocks, its initial weights, and its way to and from the Hugging Face layout."""
