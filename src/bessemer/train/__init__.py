"""From token shards to a trained model, and what is done with one.

The loop: session.py builds the parts of a training (`Training`), loop.py goes through the steps, step.py judges and takes one,
trainer.py computes its gradients and update. pace.py says which batches come next and how many steps there are; rollback.py
answers the guard; stop.py and stragglers.py watch signals and slow ranks; watch.py, metrics.py, samples.py and trackers.py log.

A step: task.py (what is predicted), engine.py (micro-batches to gradients, on one process or several), split.py (the model over a
mesh), masking.py, cross_entropy.py, recompute.py, precision.py, fp8.py, learning_rate.py, optimizer/.

State: state.py (to and from checkpoints), start.py (weights of another run), imported.py and exported.py (with card.py), audit.py
(replicas compared), validation.py.

Besides a training: measure.py times steps for a plan, profile.py where a step's time goes, replay.py and diagnose.py repeat
steps, simulate.py runs one without memory.
"""
