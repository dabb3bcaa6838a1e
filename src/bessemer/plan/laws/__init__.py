"""Scaling laws: how loss falls with parameters and tokens, and what that says of a plan."""
