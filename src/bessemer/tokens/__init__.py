"""Documents to token shards, and shards to batches."""
