"""The run directory: paths of its files, its lock, and its published stages."""
