"""The built-in formats, one class each: `WarcReader` in warc.py reads the format `warc`, and so on.

Modules here are imported when a recipe is validated, so their top-level imports must be light.
"""
