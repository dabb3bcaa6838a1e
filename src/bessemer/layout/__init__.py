"""What follows from a recipe's model and its [parallel] table without tensors: the cost model of a layout.

validity.py: whether a model divides so at all, its memory apart; pipeline_stages.py and pipeline_schedules.py: stages with the
parameters that a process holds, and who computes what in which order; flops.py, memory.py, communication.py: FLOPs, bytes
held, bytes sent; devices.py: the catalogue.
"""
