"""Write, verify, restore and retain checkpoints."""

from bessemer.checkpoint.asynchronous import AsyncSaver
from bessemer.checkpoint.protocol import Checkpoint, latest, save, verify

__all__ = ["AsyncSaver", "Checkpoint", "latest", "save", "verify"]
