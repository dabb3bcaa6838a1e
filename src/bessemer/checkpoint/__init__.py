"""Write, verify, restore and retain checkpoints.

- format.py: the manifest, which rank writes which shard, and reading into any layout.
- files.py: safetensors files.
- protocol.py: save, verify and publish by a rename.
- selection.py: choose a checkpoint by its step or its held-out loss.
- retention.py: which checkpoints to keep.
- async_save.py: save while training continues.
- mirror.py: copy to object stores. Training itself writes only to a POSIX folder.

torch.distributed.checkpoint is not used: it does not verify what it reads, and its format cannot be read without torch.
"""

from bessemer.checkpoint.async_save import AsyncSaver
from bessemer.checkpoint.format import SavedCheckpoint
from bessemer.checkpoint.protocol import latest, save, verify

__all__ = ["AsyncSaver", "SavedCheckpoint", "latest", "save", "verify"]
