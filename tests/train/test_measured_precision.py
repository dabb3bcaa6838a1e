"""train.precision = "auto" on a CPU: the faster of bf16 and fp32, measured once and kept by the run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest

from bessemer.cli import run_command
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Recipe, Train, load
from bessemer.run.files import read_json_lines
from bessemer.train import device as devices
from bessemer.train import measure, precision
from bessemer.train.device import Device
from bessemer.train.engine import concurrent_micro_batches


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return recipe_defaults.resolve(load(recipe_file), 400)


class Clock:
    """Time that passes in the steps of `ScriptedTrainer`, on top of `real` time."""

    def __init__(self, real: Callable[[], float]) -> None:
        self.now, self.real = 0.0, real

    def __call__(self) -> float:
        return self.now + self.real()


@dataclasses.dataclass
class ScriptedTrainer:
    """A trainer whose micro-batches take the scripted seconds, one after the other, and then the last ones."""

    settings: Train
    device: Device
    model: SimpleNamespace
    clock: Clock
    script: list[float]
    task: SimpleNamespace = dataclasses.field(default_factory=lambda: SimpleNamespace(made_up=lambda *_: None))

    def forward_backward(self, batch: None) -> SimpleNamespace:
        self.clock.now += self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return SimpleNamespace(grad_norm=0.0)

    def update(self, step: int, norm: float) -> None: ...


def script_steps(
    monkeypatch: pytest.MonkeyPatch, fp32: list[float], bf16: list[float], real: Callable[[], float] = lambda: 0.0
) -> Clock:
    """Let this CPU have units for bf16, and a micro-batch take the seconds given, untimed ones first."""
    clock, seconds = Clock(real), {"fp32": fp32, "bf16": bf16}
    built = measure._built_trainer

    def scripted(recipe: Recipe, config: ModelConfig, device: Device, recomputed: int | None) -> object:
        if recomputed is not None:  # a plan's timing, not a choice
            return built(recipe, config, device, recomputed)
        model = SimpleNamespace(config=config)
        return ScriptedTrainer(recipe.train, device, model, clock, list(seconds[device.precision.name]))

    monkeypatch.setattr(measure, "has_units", lambda name: True)
    monkeypatch.setattr(measure, "_built_trainer", scripted)
    monkeypatch.setattr(measure, "perf_counter", clock)
    return clock


def test_flags_of_the_processor_say_whether_it_has_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (
        ("fpu avx2 avx512f", (False, False)),
        ("avx512f avx512_bf16", (True, False)),
        ("amx_tile amx_bf16 avx512_fp16", (True, True)),
        ("fp asimdhp bf16", (True, True)),
    ):
        monkeypatch.setattr(precision, "cpu_flags", flags.split)
        assert (precision.has_units("bf16"), precision.has_units("fp16")) == expected


def test_a_cpu_without_units_takes_fp32_untimed(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """However wide the model: there, its matmuls in bf16 would take minutes."""
    clock = script_steps(monkeypatch, [100.0], [10_000.0])
    monkeypatch.setattr(measure, "has_units", lambda name: False)
    wide = dataclasses.replace(model_config(recipe, 400), width=4096, mlp_width=11_008)
    assert measure.faster_precision(recipe, wide, 8.0)[0] == "fp32" and clock.now == 0.0


STEADY = [0.9, 0.1, 0.1, 0.1]  # the first steps are slower and do not count


@pytest.mark.parametrize(
    ("fp32", "bf16", "name"),
    [
        ([0.2], STEADY, "bf16"),
        ([0.105], STEADY, "fp32"),  # what is between the matmuls gains nothing
        ([0.05], STEADY, "fp32"),
        ([0.2], [0.9, 0.1, 0.1, *[0.5, 0.1, 0.1] * 100], "bf16"),  # a neighbour slows every third step down
        ([7200.0], [3600.0], "bf16"),  # one turn of steps of hours is enough
    ],
)
def test_steps_of_the_model_decide(
    recipe: Recipe, fp32: list[float], bf16: list[float], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = script_steps(monkeypatch, fp32, bf16)
    config = model_config(recipe, 400)
    assert measure.faster_precision(recipe, config, 8.0)[0] == name
    assert clock.now < max(60, 10 * max(fp32))
    assert measure.faster_precision(recipe, config, 0.0)[0] == "bf16", "no time for steps"


def test_a_step_is_timed_as_a_whole(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    device, config = devices.choose(recipe.train.changed(precision="fp32")), model_config(recipe, 400)
    assert recipe.train.global_batch_tokens and recipe.train.micro_batch
    num_micro_batches = recipe.train.global_batch_tokens // config.sequence_length // recipe.train.micro_batch
    together = concurrent_micro_batches(recipe.train, config.sequence_length, device.torch_device, False)
    script_steps(monkeypatch, [1.0] * measure.WARMUP_STEPS + [0.2, 0.2, 0.7, 0.2], [])
    assert measure.step_seconds(recipe, config, [device], 60.0) == pytest.approx(0.2 * num_micro_batches / together)


def trained(runs: Path) -> tuple[str, list[float]]:
    rows = read_json_lines(runs / "small" / "metrics.jsonl")
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return load(runs / "small").train.precision, [losses[step] for step in sorted(losses)]


def test_a_run_keeps_what_was_chosen_at_its_start(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f"run.dir={runs}", "train.log_every=1", "train.schedule.kind=constant", "train.steps=8"
    sets = [part for key in keys for part in ("--set", key)]
    script_steps(monkeypatch, [2.0], [1.0], perf_counter)
    assert run_command(["train", str(recipe_file), *sets]) == 0
    assert "train.precision = bf16" in capsys.readouterr().err
    assert trained(runs)[0] == "bf16"
    monkeypatch.setattr(measure, "has_units", lambda name: False)  # another machine, or moment, would choose otherwise
    assert run_command(["train", str(recipe_file), *sets[:-1], "train.steps=10"]) == 0
    assert "a step takes" not in capsys.readouterr().err
    precision, losses = trained(runs)
    assert precision == "bf16" and len(losses) == 10
    # Asked for by name and trained anew it computes the same; asking for another is another recipe.
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=fp32"]) == 2
    assert "train.precision" in capsys.readouterr().err
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=bf16", "--restart"]) == 0
    assert "this CPU has no units for it" in " ".join(capsys.readouterr().err.split())
    assert trained(runs)[1] == losses[:8]
