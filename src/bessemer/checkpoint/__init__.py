"""Write, verify, restore and retain checkpoints."""

from bessemer.checkpoint.asynchronous import AsyncSaver
from bessemer.checkpoint.protocol import latest, save, verify
from bessemer.checkpoint.reading import Checkpoint

__all__ = ["AsyncSaver", "Checkpoint", "latest", "save", "verify"]
