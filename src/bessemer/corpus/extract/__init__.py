"""Extraction of text from markup: web pages and wikitext."""
