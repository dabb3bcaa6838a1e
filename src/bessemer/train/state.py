"""What survives a stop: the model, the optimizer, the position in the data, the guard's memory, the random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bessemer import __version__
from bessemer.checkpoint import Checkpoint
from bessemer.checkpoint.protocol import Tensors
from bessemer.errors import BessemerError
from bessemer.guard.judge import GuardState
from bessemer.model.transformer import Transformer
from bessemer.parallel.local import as_part_of, put
from bessemer.parallel.numbers import fingerprint
from bessemer.parallel.tied import owned_parameters, whole_name
from bessemer.recipe import Recipe, digest
from bessemer.tokens.shards import TokenStore
from bessemer.train import optimizer as optimizers
from bessemer.train.audit import Given
from bessemer.train.precision import LossScale
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class Position:
    """Where a run stands. step: updates done or skipped; samples: sequences consumed; scale: of fp16's loss; given: what the
    loader gave so far."""

    step: int = 0
    samples: int = 0
    guard: GuardState = field(default_factory=GuardState)
    scale: LossScale = field(default_factory=LossScale)
    given: Given = field(default_factory=Given)


def data_digest(store: TokenStore) -> str:
    """What the token shards hold: the hashes of all their files."""
    return digest(store.manifest["files"], store.manifest["tokenizer"]["sha256"])


def weights_digest(step: TrainStep) -> str:
    """A fingerprint of all weights, by name: two runs that agree here agree bit for bit, however they are split."""
    return fingerprint(owned_parameters(step.model), step.team)


def capture(
    step: TrainStep, position: Position, recipe: Recipe, store: TokenStore
) -> tuple[Tensors, dict[str, object]]:
    """The tensors of this process and the facts of a checkpoint. Every process calls it."""
    team, parameters = step.team, dict(owned_parameters(step.model))
    own = "" if team.is_alone else f"-{team.rank}"
    rng = {f"cpu{own}": torch.get_rng_state()}
    if step.device.is_cuda:
        rng[f"cuda{own}"] = torch.cuda.get_rng_state()
    averaged = {} if step.average is None else step.average.tensors
    tensors: Tensors = {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": optimizers.state_tensors(step.model, step.optimizer),
        "ema": {name: as_part_of(parameters[name], value) for name, value in averaged.items() if name in parameters},
        "rng": rng,
    }
    facts = {
        "samples": position.samples,
        "guard": position.guard.to_dict(),
        "loss_scale": position.scale.to_dict(),
        "given": position.given.of_all(team).to_dict(),
        "model": step.model.config.to_dict(),
        "recipe": digest(recipe),
        "data": data_digest(store),
        "weights": weights_digest(step),
        "bessemer": __version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "world": team.world,
        "layout": recipe.parallel.model_dump(),
    }
    return {part: named for part, named in tensors.items() if named}, facts


@torch.no_grad()
def restore(step: TrainStep, checkpoint: Checkpoint, store: TokenStore) -> Position:
    """Put a verified checkpoint's state back, whatever layout wrote it. Refuses when the token shards are no longer the
    ones it was trained on."""
    facts = checkpoint.facts
    if facts["data"] != data_digest(store):
        raise BessemerError(
            f"{store.folder}: the token shards have changed since {checkpoint.folder.name} was saved; the run cannot go on "
            "over other data. Put the shards back, or train under another name with --set run.name=NAME"
        )
    parameters = dict(step.model.named_parameters())
    fill_copies(step.model, checkpoint, "model", parameters)
    if "optimizer" in checkpoint:
        optimizers.load_state(step.model, step.optimizer, checkpoint)
    if step.average is not None:
        if "ema" in checkpoint:
            averaged = step.average.tensors
            held = {name: as_part_of(parameters[name], averaged[name]) for name in averaged}
            fill_copies(step.model, checkpoint, "ema", held)
        else:
            step.average.restart()
    rng = checkpoint.tensors("rng")
    own = "" if step.team.is_alone else f"-{step.team.rank}"
    if f"cpu{own}" in rng:
        torch.set_rng_state(rng[f"cpu{own}"])
    if step.device.is_cuda and f"cuda{own}" in rng:
        torch.cuda.set_rng_state(rng[f"cuda{own}"])
    scale = LossScale(**facts.get("loss_scale", {}))
    given = Given.from_dict(facts.get("given", {})).of_one(step.team)
    return Position(checkpoint.step, int(facts["samples"]), GuardState(**facts["guard"]), scale, given)


def fill_copies(model: Transformer, checkpoint: Checkpoint, part: str, named: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors from a checkpoint, a copy of a tied matrix by the name of the original."""
    copies = {name: tensor for name, tensor in named.items() if whole_name(model, name) != name}
    checkpoint.fill(part, {name: tensor for name, tensor in named.items() if name not in copies})
    if copies:
        checkpoint.fill(part, {whole_name(model, name): tensor for name, tensor in copies.items()})


@torch.no_grad()
def load_weights(step: TrainStep, checkpoint: Checkpoint, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Copy a checkpoint's weights, or `weights` made from it, into the model; every tensor must be there in its shape."""
    saved = checkpoint.tensors("model") if weights is None else weights
    for name, parameter in step.model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            found = list(saved[name].shape) if name in saved else "nothing"
            raise BessemerError(
                f"{checkpoint.folder}: tensor {name} should be {list(parameter.shape)}, the checkpoint has {found}; it "
                "belongs to another model"
            )
        put(parameter, saved[name])


def part(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    """A part that may be missing: before the first update there is no optimizer state, and not every run averages."""
    return checkpoint.tensors(name) if Path(checkpoint.folder / f"{name}.safetensors").exists() else {}
