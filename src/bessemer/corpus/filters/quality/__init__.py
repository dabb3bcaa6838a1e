"""A quality classifier: trained on labelled sources, evaluated on held-out documents, used to filter or to weight.

`decide.QualityStep` runs it over a corpus. In order: sample (labelled documents, drawn by the hash of their identity),
features (statistics and a hashed bag of words), fit, model (saved without pickle), scores (decisions and metrics).
"""
