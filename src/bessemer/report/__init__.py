"""HTML reports of runs and plans, and the live page of running ones."""
