"""Launch checklist of a run (`bessemer check`), executed on small trainings of the recipe."""
