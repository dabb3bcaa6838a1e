"""Token shards: their files, the tokens folder of a run, and the token stream of one source and split."""

from bessemer.tokens.shards.store import TokenStore

__all__ = ["TokenStore"]
