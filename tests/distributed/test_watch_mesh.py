"""Layer statistics: equal on every mesh, with alarms, and without changing a bit of the training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import local, tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.trends import Trends
from bessemer.recipe import Parallel
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, read_steps
from bessemer.tokens.loader import Batch
from bessemer.train import layer_metrics
from bessemer.train.layer_metrics import METRICS, LayerMonitor
from bessemer.train.metrics import MetricsLog
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.distributed.small_model import batches, config_of, part, recipe_of, trainer_on
from tests.train.small_trainer import batch, stats_of, trainer_of

LAYOUTS = [
    Parallel(replicate=2),
    Parallel(shard=2, zero=3),
    Parallel(tensor=2),
    Parallel(context=2),
    Parallel(pipeline=2),
    Parallel(shard=2, tensor=2, pipeline=2, zero=3),
]


class Log:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.rows.append(values)


def watched_trainer(mesh: ProcessMesh, tied: bool) -> Trainer:
    # On each tensor rank biases are whole and matrices are not.
    recipe = recipe_of("fp64").model_copy(update={"parallel": mesh.layout})
    return trainer_on(mesh, recipe, replace(config_of(tied), out_bias=True, mlp_bias=True))


def watched(layout: Parallel, tied: bool) -> tuple[dict[str, Any], bool]:
    """Return the statistics of a step, and whether its update equals that of an unwatched step bit for bit."""
    mesh, digests, log = join(layout, torch.device("cpu")), [], Log()
    for every in (1, 0):
        trainer = watched_trainer(mesh, tied)
        batch = part(batches(1)[0], mesh)
        stats = trainer.forward_backward(batch)
        with LayerMonitor(trainer, log, Trends(None), every)(1, batch, stats.skip_flag()):  # type: ignore[arg-type]
            trainer.update(0, stats.grad_norm)
        digests.append(tensors_digest(owned_parameters(trainer.model), mesh))
    return log.rows[0], digests[0] == digests[1]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [*long_but([(layout, False) for layout in LAYOUTS], (LAYOUTS[1], False), (LAYOUTS[2], False), (LAYOUTS[3], False)),
     pytest.param(Parallel(pipeline=2), True)],
    ids=str,
)  # fmt: skip
def test_statistics_equal_those_of_one_process(layout: Parallel, tied: bool) -> None:
    trainer, batch, log = watched_trainer(SINGLE_PROCESS, tied), batches(1)[0], Log()
    stats, watch = trainer.forward_backward(batch), LayerMonitor(trainer, log, Trends(None), 1)  # type: ignore[arg-type]
    for rank in range(layout.data):  # activations are those of the first sequence of each rank
        with watch(1, batch.part(rank, layout.data), stats.skip_flag()):
            if rank == layout.data - 1:
                trainer.update(0, stats.grad_norm)
    for statistics, is_unchanged in run_on(layout.world, watched, layout, tied):
        assert is_unchanged
        assert statistics.keys() == METRICS.keys() | {"seconds"}
        for name in METRICS:
            assert list(statistics[name]) == list(log.rows[-1][name]), name
            for layer, value in statistics[name].items():
                each = [row[name][layer] for row in log.rows]
                if name == "update_ratio":
                    each = each[-1:]
                expected = np.sqrt(np.mean(np.square(each))) if name == "activation_rms" else max(each)
                assert value == pytest.approx(expected, rel=1e-6), (name, layer)


def grown(layout: Parallel, incidents: Path) -> None:
    """Watch steps, with the second block's output growing before the last one."""
    mesh = join(layout, torch.device("cpu"))
    trainer = watched_trainer(mesh, False)
    watch = LayerMonitor(trainer, Log(), Trends(incidents if mesh.is_main else None), 1)  # type: ignore[arg-type]
    for number in range(1, 7):
        if number == 6:
            named = dict(trainer.model.named_parameters())
            for weight in (p for name, p in named.items() if name == "blocks.1.mlp.down.weight"):
                local(weight.detach()).mul_(1000.0)
        batch = part(batches(1)[0], mesh)
        stats = trainer.forward_backward(batch)
        with watch(number, batch, stats.skip_flag()):
            trainer.update(0, stats.grad_norm)


@pytest.mark.parametrize("layout", long_but(LAYOUTS, LAYOUTS[4]), ids=str)
def test_growth_in_one_block_sounds_an_alarm(layout: Parallel, tmp_path: Path) -> None:
    run_on(layout.world, grown, layout, tmp_path / "incidents.jsonl")
    incidents = read_steps(tmp_path / "incidents.jsonl")
    assert [(row["what"], row["step"]) for row in incidents] == [("activation", 6)]
    assert "block 1" in incidents[0]["cause"]


def statistics(
    trainer: Trainer, data: Batch, update: Callable[[], object] = bool, sample: int = layer_metrics.SAMPLE
) -> dict[str, dict[str, float]]:
    """Return the logged statistics of an update after a backward pass."""
    log = Log()
    with layer_metrics.LayerMonitor(trainer, log, Trends(None), 1, sample)(1, data, torch.zeros(())):  # type: ignore[arg-type]
        update()
    return log.rows[-1]


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gpt2", "modernbert"])
def test_activation_statistics_equal_those_of_the_forward_pass(recipe_file: Path, family: str) -> None:
    """The reference is hidden states from hooks in a plain pass, and attention scores computed in float64."""
    objective = "masked" if family == "modernbert" else "causal"
    trainer = trainer_of(recipe_file, f"model.family={family}", "model.kv_heads=2", f"train.objective={objective}")
    data = (
        batch()
        if objective == "causal"
        else trainer.task.synthetic_batch(np.random.default_rng(0), 8, trainer.model.config)
    )
    found = statistics(trainer, data)
    outs, scores = [], []

    def caught(module, arguments, out):
        x, rotation = arguments[:2]
        q, k, _ = module.queries_keys_values(x, rotation)
        logits = (q.double() @ k.double().transpose(2, 3))[0] / q.shape[-1] ** 0.5
        if trainer.model.config.causal:
            logits = logits.masked_fill(~torch.ones(32, 32, dtype=torch.bool).tril(), -torch.inf)
        scores.append(float(logits.detach().max()))

    for block in trainer.model.blocks:
        block.register_forward_hook(lambda m, a, out: outs.append(out.double()))
        block.attention.register_forward_hook(caught)
    trainer.model(torch.from_numpy(data.inputs[:1]))
    assert list(found["activation_rms"]) == ["0", "1"]
    for number, out in enumerate(outs):
        assert found["activation_rms"][str(number)] == pytest.approx(float(out.square().mean().sqrt()), rel=1e-5)
        assert found["activation_max"][str(number)] == pytest.approx(float(out.abs().max()), rel=1e-5)
        assert found["attention_logit_max"][str(number)] == pytest.approx(scores[number], rel=1e-5)


def test_every_parameter_has_a_group_and_norms_add_up(recipe_file: Path) -> None:
    trainer = trainer_of(recipe_file)
    stats = stats_of(trainer, batch())
    norms = statistics(trainer, batch())["grad_norm"]
    assert set(norms) == {"0.attention", "0.mlp", "1.attention", "1.mlp", "embedding", "head", "norms"}
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(stats.grad_norm, rel=1e-6)
    gradients = [p.grad.double().flatten() for p in trainer.model.blocks[1].mlp.parameters()]
    assert norms["1.mlp"] == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-6)


@pytest.mark.parametrize("limit", [layer_metrics.SAMPLE, 50])
def test_update_ratios_equal_those_of_the_weights(recipe_file: Path, limit: int) -> None:
    """Exactly if every element is read, approximately for a sample."""
    trainer = trainer_of(recipe_file)
    norm = trainer.forward_backward(batch()).grad_norm
    weights = {
        name: (parameter, parameter.detach().double().clone())
        for name, parameter in trainer.model.named_parameters()
        if name.startswith("blocks.0.mlp.")
    }
    found = statistics(trainer, batch(), lambda: trainer.update(0, norm), sample=limit)["update_ratio"]
    moved = torch.cat([(weight.detach() - before).flatten() for weight, before in weights.values()])
    exact = moved.norm() / torch.cat([before.flatten() for _, before in weights.values()]).norm()
    assert found["0.mlp"] == pytest.approx(float(exact), rel=1e-4 if limit > 1000 else 0.5)


def trained(
    recipe_file: Path, folder: Path, every: int, *overrides: str
) -> tuple[str, list[float], list[dict[str, object]]]:
    trainer: Trainer = trainer_of(recipe_file, *overrides)
    (folder / "tensorboard").mkdir(parents=True)
    run, losses = RunDirectory(folder), []
    with MetricsLog(run, [], 0, tensorboard=True) as log:
        around = layer_metrics.LayerMonitor(trainer, log, Trends(None), every)
        for number in range(1, 7):
            data = batch()
            data.inputs[:] = (data.inputs * number) % 400
            found = trainer.forward_backward(data)
            with around(number, data, found.skip_flag()):
                trainer.update(number - 1, found.grad_norm)
            losses.append(float(found.loss))
    return tensors_digest(owned_parameters(trainer.model), trainer.mesh), losses, read_json_lines(run.metrics)


@pytest.mark.parametrize(
    "overrides", [[], ["train.precision=bf16", "train.recompute=full", "tokens.document_mask=true"]]
)
def test_watching_does_not_change_the_training(recipe_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    weights, losses, rows = trained(recipe_file, tmp_path / "watched", 2, *overrides)
    assert (weights, losses) == trained(recipe_file, tmp_path / "not", 0, *overrides)[:2]
    assert [(row["kind"], row["step"]) for row in rows] == [("inside", 2), ("inside", 4), ("inside", 6)]
    assert {"activation_rms", "activation_max", "attention_logit_max", "grad_norm", "update_ratio", "seconds"} <= set(
        rows[0]
    )
    assert all(0 < value < 1 for value in rows[0]["update_ratio"].values())  # type: ignore[attr-defined]
    json.dumps(rows, allow_nan=False)
    assert read_json_lines(tmp_path / "not" / "metrics.jsonl") == []
