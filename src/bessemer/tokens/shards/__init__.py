"""Token shards: the files, the folder of a run, and the stream of tokens of one source and split."""

from bessemer.tokens.shards.store import TokenStore

__all__ = ["TokenStore"]
