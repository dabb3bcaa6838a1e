"""Evaluation tasks of EleutherAI's lm-evaluation-harness, while a model trains and after."""
