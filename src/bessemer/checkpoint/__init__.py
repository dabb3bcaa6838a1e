"""Write, verify, restore and retain checkpoints.

On disk: format.py (manifest, and which rank writes which shard), files.py (safetensors files), protocol.py (written, verified,
published by a rename), reading.py (into any layout), retention.py. While training goes on: staging.py (a copy in shared memory),
asynchronous.py (a process that writes it). In memory: node_memory.py (files that outlive a worker), in_memory.py (with
replicas at neighbour nodes). mirror.py copies to object stores: training itself writes to a POSIX folder alone.

This has the place of torch.distributed.checkpoint, which verifies nothing that it reads, has no format that is read without
torch, and writes from a thread that holds the interpreter.
"""

from bessemer.checkpoint.asynchronous import AsyncSaver
from bessemer.checkpoint.protocol import latest, save, verify
from bessemer.checkpoint.reading import SavedCheckpoint

__all__ = ["AsyncSaver", "SavedCheckpoint", "latest", "save", "verify"]
