"""`bessemer check`: the launch checklist of a run, executed on small trainings of its own recipe."""
