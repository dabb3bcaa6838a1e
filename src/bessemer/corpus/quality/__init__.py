"""A classifier of quality: learnt from labelled sources, measured on held-out documents, used to filter or to weigh.

`classify.classify` does all of it for a corpus. In order: sample (labelled documents, drawn by the hash of their
identity) -> features (statistics and a hashed bag of words) -> fit -> model (saved without pickle) -> scores (what they
decide, and metrics).
"""
