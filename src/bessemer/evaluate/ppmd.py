"""PPMd (Shkarin 2002) as a baseline: the compressed size of held-out text after the training text.

A model that is only slightly better than the byte 5-gram can be far worse than PPMd.
"""

from __future__ import annotations

ORDER = 10  # bytes of context
MAX_TRAIN_BYTES = 64_000_000  # maximum training text, which limits the time
MEMORY_BYTES = 1 << 30  # memory of the PPMd model, allocated as it grows; a full model is reset


def ppmd_bits(training: list[bytes], held_out: list[bytes]) -> int | None:
    """Return the bits that the held-out documents add to a PPMd stream of the training documents.

    The result is deterministic, and exact except for the few bytes that the coder still holds between texts. None without the
    extra `ppmd`.
    """
    try:
        from pyppmd import Ppmd8Encoder
    except ImportError:
        return None
    encoder = Ppmd8Encoder(ORDER, MEMORY_BYTES)
    for document in training:
        encoder.encode(document)
    return 8 * (sum(len(encoder.encode(document)) for document in held_out) + len(encoder.flush()))
