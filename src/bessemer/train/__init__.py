"""From token shards to a trained model, and what is done with one.

The loop: session.py builds the parts of a training (`Training`), judges a step and takes it, steps.py puts that in order, at once
or a step later, loop.py goes through the steps, trainer.py computes gradients and updates. horizon.py says which batches come
next and how many steps there are; rollback.py answers the guard; stragglers.py looks for slow ranks; watch.py, metrics.py and
trackers.py log.

A step: task.py (what is predicted), engine.py (micro-batches to gradients, on one process or several), split.py (the model over a
mesh), cross_entropy.py, recompute.py, precision.py, learning_rate.py, optimizer/.

State: state.py (to and from checkpoints), start.py (weights of another run), imported.py and exported.py, audit.py
(the mixture that was trained on), validation.py (scores, tasks, samples).

Besides a training: measure.py times steps for a plan, profile.py where a step's time goes, replay.py takes a
step again.
"""
