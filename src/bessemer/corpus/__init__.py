"""The corpus stage: turn raw sources into clean documents by reading, filtering, deduplicating and counting them.

`pipeline.build` writes the corpus of a run. `inputs` tells whether a corpus is up to date and imports none of the data
libraries (pyarrow, Numba, resiliparse).
"""
