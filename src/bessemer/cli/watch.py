"""`bessemer watch`: runs while they train, as a live page or as text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.errors import InputError
from bessemer.terminal import say

if TYPE_CHECKING:
    import argparse


def watch(args: argparse.Namespace) -> Any:
    """Serve the live page until Ctrl-C, or show the same as text; with --json print where the runs stand and end."""
    from bessemer.watch.live import LivePage

    folders = [runs.folder_of(place, args.overrides) for place in args.run]
    if len({run.path.resolve() for run in folders}) < len(folders):
        raise InputError("watch: one run is given twice; name each once")
    page = [name for name in ("port", "token") if getattr(args, name) is not None]
    if page and (other := [name for name in ("json", "terminal") if getattr(args, name)]):
        raise InputError(f"watch: --{page[0]} is of the page, which --{other[0]} does not serve; leave one of them out")
    if args.json and args.terminal:
        raise InputError("watch: --json and --terminal exclude each other")
    if args.json:
        from dataclasses import asdict

        rows = [{"run": one.run.path, "name": one.name, **asdict(one.status)} for one in LivePage(folders).watched()]
        return {"runs": rows}
    if args.terminal:
        from bessemer.watch.screen import follow

        follow(folders)
        return None
    from bessemer.watch.server import Server

    with Server(folders, args.port, args.token) as server:
        say("watching; Ctrl-C ends this page, not the training")
        print(server.address, flush=True)
        if "SSH_CONNECTION" in os.environ:
            port = server.server_address[1]
            say(f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the address there")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("the page has ended")
    return None
