"""The built-in formats, a class each: format `warc` is `WarcReader` of warc.py, and so on.

A module here is imported wherever a recipe is validated, so that its imports at the top are light.
"""
