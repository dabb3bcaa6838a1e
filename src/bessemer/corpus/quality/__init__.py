"""A classifier of quality: learnt from labelled sources, measured on held-out documents, used to filter or to weigh.

`bessemer.corpus.quality.classify.classify` does all of it for a corpus. In the order of the work: sample (labelled
documents, drawn by the hash of their identity) -> features (document statistics and a hashed bag of words, kernels) ->
logistic (the fit) -> model (scores; saved without pickle) -> metrics (held-out figures) -> telling (which features
speak) -> use (what the scores decide).
"""
