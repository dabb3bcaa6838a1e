"""Measuring this machine, and planning with what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer import cli, forecast
from bessemer.errors import InputError
from bessemer.measure import calibrate, collectives, disk, host, kernels, known
from bessemer.measure.rounds import ENOUGH_ROUNDS, Item, measure, timing_of
from bessemer.plan import machine as machines
from bessemer.plan.machine import WHOLE, Machine
from bessemer.recipe import load
from bessemer.run import RunFolder
from bessemer.train import device as devices
from tests.conftest import recipe_text, write_text


class Time:
    """A clock that goes only when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, wobble: Callable[[int], float] = lambda number: 1.0) -> Callable[[int], float]:
        calls = [0]

        def call(repeats: int) -> float:
            calls[0] += 1
            took = repeats * seconds * wobble(calls[0])
            self.now += took
            return took

        return call


def test_rounds_end_when_they_are_stable() -> None:
    time = Time()
    items = [Item(("a",), time.taking(0.01)), Item(("b",), time.taking(1e-5))]
    assert measure(items, 100.0, time) == ENOUGH_ROUNDS // 2
    assert items[0].timing().seconds == pytest.approx(0.01) and items[0].timing().spread == pytest.approx(0.0)
    assert items[1].repeats == 50 and items[1].timing().seconds == pytest.approx(1e-5)  # repeated for the clock's sake


def test_rounds_go_on_while_it_is_noisy_and_the_median_forgets_it() -> None:
    time = Time()
    items = [Item(("a",), time.taking(0.01, lambda number: (1.0, 1.0, 1.0, 3.0, 1.2)[number % 5]))]
    assert measure(items, 100.0, time) == ENOUGH_ROUNDS
    assert items[0].timing().seconds == pytest.approx(0.01)
    noisy = [Item(("b",), time.taking(0.01, lambda number: 1.0 + 0.1 * (number % 5)))]
    measure(noisy, 100.0, time)
    assert noisy[0].timing().spread > 0.1


def test_rounds_end_with_the_budget() -> None:
    time = Time()
    items = [Item((name,), time.taking(0.1)) for name in range(10)]
    measure(items, 7.0, time)
    assert time.now < 7.5 and all(item.seconds for item in items)
    before = time.now
    items = [Item((name,), time.taking(0.1)) for name in range(10)]
    measure(items, 0.0, time)
    assert all(item.seconds for item in items) and time.now - before < 4.0


def test_the_spread_is_the_middle_half_of_the_median() -> None:
    found = timing_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.seconds, found.spread) == (3.0, pytest.approx(2.0 / 3.0))


def test_the_sizes_go_with_the_time_there_is() -> None:
    for is_cuda in (False, True):
        counts = [len(kernels.sizes_for(seconds, 1e11, is_cuda).edges) for seconds in (0.0, 10.0, 1e4)]
        assert counts == sorted(counts) and counts[0] < counts[-1]
    fine, slow = kernels.sizes_for(60.0, 1e11, False), kernels.sizes_for(60.0, 1e9, False)  # beside busy neighbours
    assert kernels.round_flops(slow) < kernels.round_flops(fine)
    every = sum(2.0 * m * n * k for m in fine.edges for n in fine.edges for k in fine.edges)
    assert kernels.round_flops(fine) == pytest.approx(3 * every)


def test_fresh_memory_is_of_the_shape_and_another_each_time() -> None:
    fresh = kernels.Fresh(12, torch.float32, torch.device("cpu"))
    views = [fresh.of(3, 4) for _ in range(4)]
    assert all(view.shape == (3, 4) for view in views)
    assert len({view.data_ptr() for view in views[:3]}) == 3 and views[3].data_ptr() == views[0].data_ptr()


def test_every_pass_computes_what_it_says() -> None:
    made = kernels._passes(1 << 13, torch.device("cpu"))
    assert set(made) == set(kernels.MOVED)
    for name, call in made.items():
        call()
        call()
        assert name


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = disk.measure(tmp_path, 0.1)
    assert min(found.write, found.read, found.mapped) > 1e5 and list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="--disk"):
        disk.measure(tmp_path / "not-there", 0.1)


def test_the_host_is_what_no_operation_accounts_for() -> None:
    """Steps made up of the machine's own figures and a known rest give that rest back."""
    from tests.plan.test_estimate_cpu import flat, of

    made = of(whole=flat(passes=1e9))
    seconds = {}
    for depth in host.DEPTHS:
        from bessemer.model.huggingface.config import model_config
        from bessemer.plan.estimate import cpu

        config = model_config(host.tiny(depth, 1), host.VOCABULARY)
        once = cpu.micro_batch(config, host.LENGTH, host.LENGTH, made, WHOLE)
        seconds[WHOLE, depth, "gradients"] = once.total + depth * 3e-4 + 7e-4
        seconds[WHOLE, depth, "update"] = cpu.update(config, made).total + depth * 2e-5 + 9e-5
    found = host.host_of(seconds, WHOLE, made)
    assert found.block == pytest.approx(3e-4) and found.micro_batch == pytest.approx(7e-4)
    assert found.update_block == pytest.approx(2e-5) and found.update == pytest.approx(9e-5)


@pytest.mark.parametrize("minutes", [0.0, -1.0, 0.001, float("nan")])
def test_too_small_a_budget_is_refused(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--minutes.*0.05"):
        calibrate.calibrate(minutes, tmp_path)


def test_one_process_sends_nothing() -> None:
    assert collectives.measure(1.0, "cpu", 1) == ()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine, measured for a few seconds by the command."""
    folder = tmp_path_factory.mktemp("calibrated")
    path = folder / "machine.toml"
    options = ["--minutes", "0.05", "--calibration", str(path), "--disk", str(folder)]
    assert cli.run_command(["plan", "--calibrate", *options, "--json"]) == 0
    return path


@pytest.mark.long
def test_this_machine_is_measured(calibrated: Path) -> None:
    found = machines.load(calibrated)
    assert found.kind == "cpu" and found.torch == torch.__version__ and found.threads == torch.get_num_threads()
    assert 1e8 < found.matmul_rate(128, 128, 128) < 1e14 and found.bandwidth > 1e8
    assert found.disk is not None and found.all_reduce and found.all_reduce[0].processes == 2


def small(folder: Path) -> Path:
    write_text(folder / "text")
    (folder / "my.toml").write_text(recipe_text(folder))
    return folder / "my.toml"


@pytest.mark.long
def test_a_plan_is_predicted_where_a_step_is_not_measured(calibrated: Path, tmp_path: Path) -> None:
    recipe = load(small(tmp_path))
    told, _ = forecast.plan_only(recipe, RunFolder(tmp_path / "none"), calibrated, measure=False)
    assert told["step_seconds_from"] == forecast.PREDICTED
    low, high = told["step_interval"]
    assert low < told["step_seconds"] < high
    guessed, _ = forecast.plan_only(recipe, RunFolder(tmp_path / "none"), None, measure=True)
    assert guessed["step_seconds_from"] == "measured on this machine" and guessed["step_interval"] is None


def test_a_calibration_of_another_machine_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.plan.test_machine import machine

    path = tmp_path / "machine.toml"
    machines.save(machine(), path)
    device = devices.choose(load(small(tmp_path)).train)
    assert known.machine_of(device, path) is None
    assert "is not used" in capsys.readouterr().err
    same = machine(name=calibrate.machine_name(device.name), threads=torch.get_num_threads(), torch=torch.__version__)
    machines.save(same, path)
    found = known.machine_of(device, path)
    assert isinstance(found, Machine) and found.name == same.name


@pytest.mark.long
def test_a_run_is_held_against_its_plan_and_scales_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path)
    assert cli.run_command(["run", str(recipe)]) == 0
    folder = tmp_path / "runs" / "small"
    told = json.loads((folder / "planned_against_measured.json").read_text())
    assert told["step_seconds"]["measured"] > 0 and told["memory_bytes"]["measured"] > 1e7
    assert abs(told["memory_bytes"]["error"]) < 0.5
    shown = capsys.readouterr().err
    assert "planned" in shown and "measured" in shown
    (folder / "planned_against_measured.json").unlink()
    assert cli.run_command(["report", str(folder)]) == 0
    assert (folder / "planned_against_measured.json").exists() and "planned" in capsys.readouterr().out
    assert cli.run_command(["plan", str(recipe), "--set", "model.layers=4", "--measured", str(folder), "--json"]) == 0
    scaled: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert scaled["step_seconds"] > told["step_seconds"]["measured"] and scaled["calibrated_on"]["steps"] > 3
    low, high = scaled["step_interval"]
    assert low < scaled["step_seconds"] < high


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "2"], "--calibrate"),
        (["my", "--disk", "."], "--calibrate"),
        (["my", "--calibrate"], "takes no recipe"),
        (["--calibrate", "--minutes", "0"], "--minutes"),
        (["--measured", "runs/x"], "name the recipe"),
        (["demo", "--measured", "runs/not-there"], "no run lies here"),
    ],
)
def test_what_does_not_go_together_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["plan", *words]) == 2
    assert said in capsys.readouterr().err
