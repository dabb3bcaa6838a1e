"""A run's training on several processes: started, watched, begun again, and what became of it told."""
