"""The keys that a recipe leaves out: width, batch, learning rate, steps (derived_keys.py), by the rules of the literature
(scaling_rules.py). They follow from the model's FLOPs and from what fits; derived.py at the top asks them for a run.
"""
