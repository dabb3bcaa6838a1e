"""The guard: detects anomalies of steps and runs, decides on a response, and records it.

detection.py raises alarms, policy.py gives the verdict on a step, incidents.toml has the kinds with their responses and advice.
train/alarm_response.py has what a rollback does, how far it goes back, which batches it skips, how many there may be and when the
run stops; train/step.py the order of judging and updating; train/stragglers.py slow ranks; recipe/schema.py the settings and
their defaults.

journal.py has the decisions that a repetition of the run takes over, trends.py what grows or slows down and is recorded only,
goodput.py where the wall time goes, heartbeat.py whether a process makes progress, alerts.py posts incidents to a URL.
"""
