"""Raw sources to clean documents: read, extract, judge, deduplicate, count.

`bessemer.corpus.pipeline.build` writes the corpus folder of a run. Importing this package is cheap; the data
libraries (pyarrow, Numba, resiliparse, ...) are imported when a corpus is built.
"""
