"""The planner: step time, memory, layout, days and cost of a run, from arithmetic alone."""
