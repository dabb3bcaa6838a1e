"""Decisions on single documents: language, rules, evaluation sets, personal data, quality.

`chain.filters_of` defines the order.
"""
