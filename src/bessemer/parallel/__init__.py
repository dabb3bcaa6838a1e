"""One mesh of processes, five ways to split a model; the same loss whatever the split."""
