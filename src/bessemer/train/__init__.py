"""From token shards to a trained model, and what is done with one.

The loop: run_spec.py is what was decided before, setup.py builds the parts of a training (`Training`), step.py takes a
step and has the guard judge it, loop.py iterates over the steps, trainer.py computes gradients and updates. batch_stream.py has
the batches; alarm_response.py carries out what the guard decides; stragglers.py finds slow ranks;
layer_metrics.py, metrics.py and trackers.py log; callback.py has the base class of what people add.

A step: objective.py and masking.py (what is predicted), task.py (that of a model), engine.py (micro-batches to gradients, on one
process or several), parallelize.py (the model over a mesh), loss.py, recompute.py, precision.py, schedule.py,
update_rule.py, optimizer/.

State: state.py (to and from checkpoints), starting_weights.py (weights of another run), mixture_audit.py (the mixture that was
trained on), validation.py (scores, tasks, samples).

Besides a training: measure.py times steps for a plan, profile.py where a step's time goes, replay.py takes a step again.
"""
