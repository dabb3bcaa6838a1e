"""The agent of a node: torch's elastic agent (the core of torchrun) in a process of its own.

`python -m bessemer.launch.agent JSON` starts `python ARGUMENTS` N times in one group with those of the other nodes, and
restarts the group after a process was lost, or the first node, without which the nodes cannot meet (launch/store.py). It is a
separate process so that Ctrl-C in a terminal reaches only the command, which asks the processes to stop.

torchrun itself cannot be configured to do this: its exit code is 1 whatever happened, it restarts a training that was stopped
on request, and it kills a process that still saves 30 s after a stop signal. So this is torch's `elastic_launch` with its
signal handling turned off, and processes report why they end in files (launch/status.py) instead of exit codes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from bessemer import interrupt


def main() -> int:
    """Exit code 0 when all processes ended well, 1 when they could not be restarted, 2 when the nodes' rendezvous failed."""
    # Stop signals are passed on by the command; schedulers send them to every process of a node. SIG_IGN would be inherited by
    # the processes, a handler is not.
    interrupt.handle(lambda *_: None)
    # The kernel ends the agent with the command, and its processes with it in the same way (`Member.work`, ForkServer): an
    # exception by a signal could be raised anywhere, also where Python drops it, and its traceback would be shown.
    interrupt.end_with_parent(signal.SIGKILL)

    from bessemer.launch import status
    from bessemer.launch.fork_server import ForkServer
    from bessemer.launch.start import LaunchSpec

    os.environ[status.AGENT] = str(os.getpid())
    spec, place = LaunchSpec.parse(sys.argv[1]), Path(os.environ["BESSEMER_NODE"])
    # Torch takes seconds to load; a signal may come meanwhile.
    forks = ForkServer() if os.environ.get("BESSEMER_FORKS") != "0" and sys.platform == "linux" else None
    from bessemer.launch.node_agent import NodeAgent

    try:
        return NodeAgent(spec, place, forks).run()
    finally:
        if forks is not None:
            forks.close()


if __name__ == "__main__":
    sys.exit(main())
