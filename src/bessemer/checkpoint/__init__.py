"""Write, verify, restore and retain checkpoints."""

from bessemer.checkpoint.protocol import Checkpoint, latest, save, verify

__all__ = ["Checkpoint", "latest", "save", "verify"]
