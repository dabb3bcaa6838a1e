"""Text out of markup: web pages and wikitext."""
