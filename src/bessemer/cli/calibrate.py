"""`bessemer calibrate`: this machine measured, as an entry of the catalogue of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.terminal import rate, size

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    calibrate_ = commands.add("calibrate", "measure this machine's matmuls, memory, all-reduce and disk", calibrate)
    calibrate_.add_argument(
        "--out", default="machine.toml", metavar="FILE", help="file to write (default machine.toml)"
    )
    calibrate_.add_argument(
        "--disk", default=".", metavar="DIR", help="folder of the disk to measure (default: this one)"
    )
    calibrate_.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the entry, and show it. Raises InputError where a folder or file cannot be written."""
    from bessemer.calibrate import device_entry, disk_rates, write

    disk = disk_rates(Path(args.disk))
    entry = device_entry(args.device, disk)
    write(Path(args.out), entry)
    if not args.json:
        shown = {
            "device": f"{entry['name']}, {size(1e9 * entry['memory'])}",
            "matmul": ", ".join(
                f"{name} {rate(1e12 * entry['matmul'] * peak)}" for name, peak in entry["flops"].items()
            ),
            "memory": f"{size(1e9 * entry['bandwidth'])}/s",
            "all-reduce": f"{size(1e9 * entry['intra'])}/s from each process",
            "disk": ", ".join(f"{verb} {size(value)}/s" for verb, value in disk.items())
            + f"; cluster.storage_bandwidth = {disk['writes'] / 1e9:.2g}",
            "kept in": f"{args.out}: `bessemer plan --catalogue {args.out} --gpus '8x{entry['name']}'` plans with it",
        }
        print("\n".join(f"{name:<12} {value}" for name, value in shown.items()))
    return {"file": args.out, "device": entry, "disk": disk}
