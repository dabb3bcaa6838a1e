"""The guard: detects anomalies of steps and runs, decides on a response, and records it."""
