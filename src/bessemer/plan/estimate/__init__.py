"""What a step of a job takes on a cluster, in memory and in time, worked out part by part."""
