"""Memory and seconds of a training step of a job on a cluster, part by part."""
