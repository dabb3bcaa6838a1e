"""Conversion to and from the Hugging Face layout.

One table of names and one of tensor views describe both directions. The gate compares every export with `transformers`.
"""
