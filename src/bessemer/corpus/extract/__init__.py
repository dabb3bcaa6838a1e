"""Text out of markup: web pages, wikitext, and the prose in installed Python packages."""
