import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.distributed.sharded_tensors import tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.trends import Trends
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train import layer_metrics
from bessemer.train.metrics import MetricsLog
from bessemer.train.trainer import Trainer
from tests.train.small_trainer import batch, stats_of, trainer_of


class Log:
    def write(self, kind: str, step: int, **values: Any) -> None:
        self.values = values


def statistics(
    trainer: Trainer, data: Batch, update: Callable[[], object] = bool, sample: int = layer_metrics.SAMPLE
) -> dict[str, dict[str, float]]:
    """What is logged of an update, after a backward pass."""
    log = Log()
    with layer_metrics.Watch(trainer, log, Trends(None), 1, sample)(1, data, torch.zeros(())):  # type: ignore[arg-type]
        update()
    return log.values


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gpt2", "modernbert"])
def test_activations_are_those_of_the_forward_pass(recipe_file: Path, family: str) -> None:
    """Against hidden states caught by hooks in a plain pass, and scores computed whole in float64."""
    objective = "masked" if family == "modernbert" else "causal"
    trainer = trainer_of(recipe_file, f"model.family={family}", "model.kv_heads=2", f"train.objective={objective}")
    data = batch() if objective == "causal" else trainer.task.made_up(np.random.default_rng(0), 8, trainer.model.config)
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
def test_update_ratios_are_those_of_the_weights(recipe_file: Path, limit: int) -> None:
    """Exactly when every element is taken, nearly when a sample is."""
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
        around = layer_metrics.Watch(trainer, log, Trends(None), every)
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
def test_watching_changes_no_bit(recipe_file: Path, tmp_path: Path, overrides: list[str]) -> None:
    weights, losses, rows = trained(recipe_file, tmp_path / "watched", 2, *overrides)
    assert (weights, losses) == trained(recipe_file, tmp_path / "not", 0, *overrides)[:2]
    assert [(row["kind"], row["step"]) for row in rows] == [("inside", 2), ("inside", 4), ("inside", 6)]
    assert {"activation_rms", "activation_max", "attention_logit_max", "grad_norm", "update_ratio", "seconds"} <= set(
        rows[0]
    )
    assert all(0 < value < 1 for value in rows[0]["update_ratio"].values())  # type: ignore[attr-defined]
    json.dumps(rows, allow_nan=False)
    assert read_json_lines(tmp_path / "not" / "metrics.jsonl") == []
