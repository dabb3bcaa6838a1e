"""Take screenshots of a run's live page and report with headless Chromium, for the documentation: light, dark, phone."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

sys.path.insert(0, str(Path(__file__).parent.parent))
from bessemer.report import page
from bessemer.report.live_server import Server
from bessemer.run.directory import RunDirectory
from tests.chromium import Chromium

VIEWS = {"light": (1280, 1000, False), "dark": (1280, 1000, False), "phone": (390, 844, True)}
SETTLE_SECONDS = 3.0  # time to draw the figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    run = RunDirectory(args.run)
    report = page.write(run).resolve()
    with Server([run], 0) as server, TemporaryDirectory() as profiles:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for view, (width, height, mobile) in VIEWS.items():
            for name, address in (("watch", server.address), ("report", f"file://{report}")):
                with Chromium(Path(profiles) / f"{name}-{view}", width, height) as browser:
                    browser.resize(width, height, mobile)
                    if view == "dark":
                        browser.dark()
                    browser.open(address)
                    if name == "watch":
                        browser.run(
                            "document.getElementById('curves').scrollIntoView()"
                            if view == "phone"
                            else "scrollTo(0, 60)"
                        )
                    sleep(SETTLE_SECONDS)
                    browser.screenshot(args.out / f"{name}-{view}.png")
        server.shutdown()


if __name__ == "__main__":
    main()
