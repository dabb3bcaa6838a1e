"""Text measures compiled with Numba: character classes, words, lines, n-grams and their hashes.

`characters` needs only NumPy; the other modules load Numba and are imported inside functions.
"""
