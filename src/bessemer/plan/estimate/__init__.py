"""Memory and step-time estimates of a training job on a cluster."""
