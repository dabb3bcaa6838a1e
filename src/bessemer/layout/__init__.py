"""What follows from a recipe's model and its [parallel] table without tensors: the cost model of a layout.

fit.py: whether they fit; pipeline_stages.py and pipeline_schedules.py: stages, and who computes what in which order; flops.py,
memory.py, communication.py: FLOPs, bytes held, bytes sent; devices.py: the catalogue. derived_keys.py and scaling_rules.py give
the keys that a recipe leaves out (width, batch, learning rate, steps): they need the FLOPs and what fits. The top-level
derived.py asks them for a run.
"""
