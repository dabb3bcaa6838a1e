"""Raw sources to clean documents: read, extract, judge, deduplicate, count.

`pipeline.build` writes the corpus folder of a run; `inputs` says whether one is current, without the data libraries
(pyarrow, Numba, resiliparse, ...).
"""
