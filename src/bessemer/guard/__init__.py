"""The guard: detects anomalies of steps and runs, decides on a response, and records it.

detection.py raises alarms, policy.py gives the verdict on a step, incidents.toml has the kinds with their responses and advice.
What a rollback does, how far back, which batches it skips, how many there may be and when the run stops stands in
train/rollback.py, the order of judging and updating in
train/session.py, slow ranks in train/stragglers.py, the settings and their defaults in recipe/schema.py.

journal.py has the decisions that a repetition of the run takes over, trends.py what grows or slows down and is recorded only,
goodput.py where the wall time goes, heartbeat.py whether a process makes progress, alerts.py posts incidents to a URL.
"""
