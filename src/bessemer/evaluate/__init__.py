"""Evaluation of runs: held-out scores with baselines, tasks, generated samples and chat."""
