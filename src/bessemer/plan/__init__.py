"""Training planner: analytical estimates of step time, memory, layout, duration and cost."""
