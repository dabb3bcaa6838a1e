"""One mesh of processes (mesh.py), five ways to split a model; the same loss whatever the split.

The ways: data.py (DDP, FSDP2), tensor.py, context.py, pipeline.py with tied_embedding.py, made of
collectives.py and sharded_tensors.py.
"""
