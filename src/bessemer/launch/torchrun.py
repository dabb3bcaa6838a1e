"""`torchrun` as a subprocess of the command: it ends with the command, and prints no traceback of what the command reports."""

from __future__ import annotations

import logging
import signal
import sys

from bessemer import interrupt


def main() -> None:
    """Run torchrun with the arguments of this process."""
    interrupt.end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun handles it
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main()
    except (ChildFailedError, SignalException):
        sys.exit(1)


if __name__ == "__main__":
    main()
