"""Character classes, words, lines, n-grams and their hashes, compiled with Numba.

`characters` needs NumPy alone; the other modules load Numba and are imported inside functions.
"""
