"""Quality classifier that is trained on labelled sources, evaluated on held-out documents, and used to filter or weight.

`decide.QualityStep` runs it over a corpus. `sample` draws labelled documents by the hash of their identity, `classify` trains
and evaluates the classifier, and `model` computes features, stores weights without pickle, and scores texts.
"""
