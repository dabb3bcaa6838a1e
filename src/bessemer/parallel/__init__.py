"""One mesh of processes, five ways to split a model; the same loss whatever the split.

mesh.py has the ranks, collectives.py and dtensors.py what the splits are made of: data.py (DDP, FSDP2), tensor.py, context.py,
pipeline.py with tied.py. Beside them: control.py (decisions of rank 0), replicas.py (whether copies are equal), traffic.py (bytes
sent) and waiting.py (seconds waited).
"""
