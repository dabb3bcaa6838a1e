"""The guard: detects anomalies of steps and runs, chooses a response, and records it.

- detection.py raises alarms, and policy.py gives the verdict on a step.
- incidents.toml lists the kinds of incident with their responses and advice.
- journal.py stores the decisions that a rerun repeats.
- trends.py records what grows or slows down, without a response.
- goodput.py measures where the wall time goes.
- heartbeat.py checks that a process makes progress.
- alerts.py posts incidents to a URL.

The responses are in train/: alarm_response.py decides how far a rollback goes, which batches it skips and when the run stops,
step.py has the order of judgement and update, and stragglers.py finds slow ranks. recipe/schema.py has the settings.
"""
