"""The step and the loop: token shards to a trained model."""
