"""Start a training on several processes, restart it after a failure, and report how it ended."""
