"""Write, verify, restore and retain checkpoints."""

from bessemer.checkpoint.asynchronous import AsyncSaver
from bessemer.checkpoint.protocol import latest, save, verify
from bessemer.checkpoint.reading import SavedCheckpoint

__all__ = ["AsyncSaver", "SavedCheckpoint", "latest", "save", "verify"]
