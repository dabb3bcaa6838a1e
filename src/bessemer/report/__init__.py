"""HTML reports of runs and plans, and the live page of active runs."""
