"""PPMd (Shkarin 2002) as a baseline: what a good compressor needs for the held-out text once it has read the training text.

A model that is only a little below the byte 5-gram can be far above it.
"""

from __future__ import annotations

ORDER = 10  # bytes of context
MAX_TRAIN_BYTES = 64_000_000  # of training text, which bounds the time
MEMORY_BYTES = 1 << 30  # of its model, touched as it grows, which starts afresh where it is full


def ppmd_bits(training: list[bytes], held_out: list[bytes]) -> int | None:
    """Return the bits that the held-out documents take in one PPMd stream after the training documents.

    Deterministic, and exact to the few bytes that the coder still holds where one text ends. None without the extra `ppmd`.
    """
    try:
        from pyppmd import Ppmd8Encoder
    except ImportError:
        return None
    encoder = Ppmd8Encoder(ORDER, MEMORY_BYTES)
    for document in training:
        encoder.encode(document)
    return 8 * (sum(len(encoder.encode(document)) for document in held_out) + len(encoder.flush()))
