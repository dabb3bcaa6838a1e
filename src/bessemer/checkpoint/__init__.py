"""Write, verify, restore and retain checkpoints.

On disk: format.py (manifest, which rank writes which shard, and reading into any layout), files.py (safetensors files),
protocol.py (written, verified, published by a rename), selection.py (by step, or the best), retention.py. async_save.py saves
while training continues. mirror.py copies to object stores; training writes to a POSIX folder only.

This has the place of torch.distributed.checkpoint, which verifies nothing that it reads and has no format that is read without
torch.
"""

from bessemer.checkpoint.async_save import AsyncSaver
from bessemer.checkpoint.format import SavedCheckpoint
from bessemer.checkpoint.protocol import latest, save, verify

__all__ = ["AsyncSaver", "SavedCheckpoint", "latest", "save", "verify"]
