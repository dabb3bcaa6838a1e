"""The process mesh of a run and the five ways to divide training over it, with the same loss for every layout.

`mesh.py` creates the process groups. `data.py` (DDP and FSDP2), `tensor.py`, `context.py` and `pipeline.py` (with
`tied_embedding.py`) implement the parallelism, based on `collectives.py` and `sharded_tensors.py`.
"""
