"""The transformer: its configuration, blocks and initial weights, and its conversion to and from the Hugging Face layout."""
