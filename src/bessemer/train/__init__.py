"""Train a model on token shards.

The loop: run_spec.py is the specification of a run, setup.py builds the parts of a training (`Training`), step.py takes a step
and has the guard judge it, loop.py iterates over the steps, and trainer.py computes gradients and updates. batch_stream.py
yields the batches, alarm_response.py carries out the guard's decisions, and stragglers.py finds slow ranks. layer_metrics.py,
metrics.py and trackers.py log. callback.py has the base class of user callbacks.

A step: objective.py and masking.py choose what is predicted, task.py applies an objective to a model, engine.py turns
micro-batches into gradients, and parallelize.py divides the model over a mesh. loss.py, recompute.py, precision.py,
schedule.py, update_rule.py and optimizer/ are its other parts.

The state: state.py reads and writes checkpoints, starting_weights.py loads the weights of another model or run,
mixture_audit.py counts what was read from each source, and validation.py scores the model.

Outside of a training: measure.py times steps for a plan, profile.py profiles steps, and replay.py repeats a single step.
"""
