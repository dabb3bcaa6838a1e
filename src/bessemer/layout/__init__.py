"""What follows from a recipe's model and its [parallel] table: shapes, stages, schedules, FLOPs, bytes, communication.

derived_keys.py and scaling_rules.py give the keys that a recipe leaves out: width, batch, learning rate, steps.
"""
