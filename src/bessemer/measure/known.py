"""The calibration of the device that a run is for."""

from __future__ import annotations

from pathlib import Path

import torch

from bessemer.measure.calibrate import machine_name
from bessemer.plan.machine import Machine, default_path, load
from bessemer.terminal import warn
from bessemer.train.device import Device


def machine_of(device: Device, path: Path | None = None) -> Machine | None:
    """What was measured of this device with this torch and as many threads; None, with a warning, when it was another.

    path: of the calibration; None: the user's, if there is one. Raises InputError for a file that cannot be read.
    """
    place = path or default_path()
    if path is None and not place.exists():
        return None
    machine = load(place)
    name, threads = machine_name(device.name), torch.get_num_threads()
    if not machine.is_of(name, threads, torch.__version__):
        was = f"{machine.name}, {machine.threads} threads, torch {machine.torch}"
        warn(
            f"{place}: measured on {was}; here it is {name}, {threads} threads, torch {torch.__version__}, so it is not used; "
            "measure anew with `bessemer plan --calibrate`"
        )
        return None
    return machine
