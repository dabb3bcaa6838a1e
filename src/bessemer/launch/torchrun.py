"""A wrapper around torchrun that ends with its parent and after a stop, and prints no traceback of reported errors.

It exits with 0 after a stop signal: the reports of the processes tell how the training ended (launch/outcome.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from threading import Thread

from bessemer.common import interrupt

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGXCPU"
LINGER_SECONDS = 10.0  # time for torchrun to exit after its processes, since it may wait minutes for other nodes
POLL_SECONDS = 0.2


def main() -> None:
    """Run torchrun with the arguments of this process."""
    interrupt.end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torchrun installs its handler
    _end_after_stop()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with a shared store, restarts fail (torch 2.11 to 2.13)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    logging.disable()  # launch/outcome.py reports the errors that matter
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    try:
        with contextlib.suppress(SignalException):  # on a failure, srun would end the other nodes, which may still save
            run.main([f"--signals-to-handle={SIGNALS}", *sys.argv[1:]])
    except (ChildFailedError, RendezvousClosedError):  # the rendezvous is closed when another node has given up
        sys.exit(1)


def _end_after_stop() -> None:
    """Exit soon after the worker processes have ended following a stop signal.

    If they end before torchrun handles the signal, it waits in C++, where no signal handler runs, for the torchrun of each
    other node. This takes up to 300 s, since the signal has ended those too.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)

    def watch() -> None:
        os.read(readable, 1)  # any signal is a stop signal, since torchrun handles no others
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                time.sleep(POLL_SECONDS)
        time.sleep(LINGER_SECONDS)
        os._exit(0)

    Thread(target=watch, name="stop", daemon=True).start()


if __name__ == "__main__":
    main()
