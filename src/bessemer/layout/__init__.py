"""What follows from a recipe's model and its [parallel] table without tensors: the cost model of a layout.

fit.py: whether they fit; pipeline_stages.py and pipeline_schedules.py: stages, and who computes what in which order;
sharding.py: parameters that a process holds; flops.py, memory.py, communication.py: FLOPs, bytes held, bytes sent; devices.py:
the catalogue.
"""
