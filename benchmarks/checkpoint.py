"""Cost of checkpoints: time a step waits, slowdown of steps during a background save, and save and load rates.

Foreground saves, background saves and plain steps take turns, so that a noisy machine slows all of them. The rates are compared
with the disk's. Training uses one thread fewer than there are cores, which leaves a core to the writer.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import describe, wait_until_idle

from bessemer.checkpoint import AsyncSaver, latest, save
from bessemer.checkpoint.files import BLOCK_BYTES
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import parse
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train import optimizer as optimizers
from bessemer.train.trainer import Trainer

RECIPE = """
run.name = "checkpoint"
tokens.sequence_length = 256
train.steps = 1000
train.global_batch_tokens = {tokens}
train.optimizer.learning_rate = 0.001
[model]
layers = {layers}
width = {width}
heads = 8
mlp_width = {mlp}
"""
VOCABULARY = 8192


def built(layers: int, width: int, tokens: int) -> tuple[Trainer, Batch]:
    """Build a trainer, take one step and return the trainer with its batch."""
    recipe = resolve(
        parse(RECIPE.format(tokens=tokens, layers=layers, width=width, mlp=3 * width), "benchmark"), VOCABULARY
    )
    config, device = model_config(recipe, VOCABULARY), devices.choose(recipe.train)
    trainer = Trainer(recipe, build_model(config, 0), device, 0, 1)
    shape = tokens // config.sequence_length, config.sequence_length + 1
    batch = Batch.next_token(
        0, np.random.default_rng(0).integers(0, VOCABULARY, shape), np.zeros(shape[0], dtype=np.int64)
    )
    trainer.update(0, trainer.forward_backward(batch).grad_norm)
    return trainer, batch


def seconds_of_step(trainer: Trainer, batch: Batch) -> float:
    started = perf_counter()
    trainer.update(0, trainer.forward_backward(batch).grad_norm)
    devices.synchronize(trainer.device)
    return perf_counter() - started


def disk_rates(folder: Path, size: int) -> tuple[float, float]:
    """Return the bytes/s of writing and syncing a file, and of reading it after it left the page cache."""
    block, path = os.urandom(BLOCK_BYTES), folder / "plain"
    started = perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
    written = perf_counter() - started
    forget(path)
    started, buffer = perf_counter(), bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    read = perf_counter() - started
    path.unlink()
    return size / written, size / read


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(trainer: Trainer, batch: Batch, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the median times of saves, loads and steps. The first save, which allocates memory, is reported separately."""
    tensors = {
        "model": {name: one.detach() for name, one in owned_parameters(trainer.model)},
        "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer),
    }
    size = sum(one.nbytes for named in tensors.values() for one in named.values())
    times: dict[str, list[float]] = {
        name: [] for name in ("plain", "during", "foreground", "stall", "background", "load")
    }
    disk: list[tuple[float, float]] = []
    published = Event()
    with AsyncSaver(folder / "background", keep=1, optimizer=trainer.optimizer) as saver:
        saver.on_published = published.set
        for number in range(rounds + 1):
            disk.append(disk_rates(folder, size))
            started = perf_counter()
            save(folder / "foreground", number, tensors, {}, keep=1)
            times["foreground"].append(perf_counter() - started)
            plain = [seconds_of_step(trainer, batch) for _ in range(6)]
            published.clear()
            started = perf_counter()
            saver.save(number, tensors, {})
            stall, norm = perf_counter() - started, trainer.forward_backward(batch).grad_norm
            waited = perf_counter()
            saver.wait_copied()
            times["stall"].append(stall + perf_counter() - waited)
            trainer.update(0, norm)
            during = []
            while not published.is_set():
                during.append(seconds_of_step(trainer, batch))
            times["background"].append(perf_counter() - started)
            plain += [seconds_of_step(trainer, batch) for _ in range(6)]
            times["plain"].append(median(plain))
            times["during"].append(median(during[:-1] or during))
            for path in (folder / "background").rglob("*.safetensors"):
                forget(path)
            started = perf_counter()
            found = latest(folder / "background")
            assert found is not None
            for part, named in tensors.items():
                found.fill(part, named.items())
            times["load"].append(perf_counter() - started)
    middle = {name: median(values[1:]) for name, values in times.items()}
    write_rate, read_rate = (median(values) for values in zip(*disk[1:], strict=True))
    return {
        "bytes": size,
        "step_seconds": middle["plain"],
        "foreground_seconds": middle["foreground"],
        "stall_seconds": middle["stall"],
        "first_stall_seconds": times["stall"][0],
        "stall_share": middle["stall"] / middle["foreground"],
        "background_seconds": middle["background"],
        "slowdown": median(b / a for a, b in zip(times["plain"][1:], times["during"][1:], strict=True)) - 1.0,
        "load_seconds": middle["load"],
        "disk_write": write_rate,
        "disk_read": read_rate,
        "save_share": size / middle["foreground"] / write_rate,
        "load_share": size / middle["load"] / read_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--wait", type=float, default=20.0, help="seconds to wait for idle cores")
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wait_until_idle(given.wait)
    torch.set_num_threads(given.threads)
    machine = describe(threads=given.threads)
    step, batch = built(given.layers, given.width, given.tokens)
    with TemporaryDirectory(dir=given.folder) as folder:
        found = measure(step, batch, Path(folder), given.rounds)
    print(
        f"{found['bytes'] / 1e6:.0f} MB, {found['step_seconds']:.2f} s per step\n"
        f"foreground save {found['foreground_seconds']:.2f} s, {found['save_share']:.0%} of the disk's rate "
        f"({found['disk_write'] / 1e6:.0f} MB/s)\n"
        f"background save: the step waits {1e3 * found['stall_seconds']:.0f} ms ({found['stall_share']:.1%} of that; first save "
        f"{1e3 * found['first_stall_seconds']:.0f} ms); written in {found['background_seconds']:.2f} s, steps "
        f"{found['slowdown']:+.1%} slower meanwhile\n"
        f"verified and loaded in {found['load_seconds']:.2f} s, {found['load_share']:.0%} of the disk's rate "
        f"({found['disk_read'] / 1e6:.0f} MB/s)"
    )
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
