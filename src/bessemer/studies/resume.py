"""Resume: a training that was stopped halfway against one that never was, by way of a real checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bessemer.checkpoint import save
from bessemer.parallel.dtensors import tensors_digest
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Recipe
from bessemer.studies.base import Row, Rows, Variation, build, fit, python_text, scored
from bessemer.train import optimizer as optimizers


def _stopped(recipe: Recipe, stops: bool = True, optimizer: bool = True, position: bool = True) -> Row:
    """Train, stop halfway, and go on from the checkpoint in a new trainer. optimizer, position: whether it gets back the
    optimizer's state, and the place in the data."""
    read, trainer, half = python_text(recipe), build(recipe), (recipe.train.steps or 0) // 2
    row = fit(trainer, read, 0, half)
    if stops:
        with tempfile.TemporaryDirectory() as folder:
            tensors = {"model": {name: p.detach() for name, p in trainer.model.named_parameters()},
                       "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer)}  # fmt: skip
            saved = save(Path(folder), half, tensors, {}, 1)
            trainer = build(recipe.changed(run=recipe.run.model_copy(update={"seed": recipe.run.seed + 1})))
            saved.fill("model", trainer.model.named_parameters())
            if optimizer:
                optimizers.load_state(trainer.model, trainer.optimizer, saved)
    rest = fit(trainer, read if position else (lambda step: read(step - half)), half)
    losses = row["losses"] + rest["losses"]
    return {**rest, "losses": losses, "steps": len(losses), "bits_per_byte": scored(trainer).bits_per_byte,
            "weights": tensors_digest(trainer.model.named_parameters(), SINGLE_PROCESS)[:8]}  # fmt: skip


def _shows(rows: Rows) -> list[str]:
    never, back = rows["never stopped"], rows["resumed"]
    bare, again = rows["no optimizer state"], rows["data from its start"]
    half = len(never["losses"]) // 2
    same = never["weights"] == back["weights"] and never["losses"] == back["losses"]
    jump = max(a - b for a, b in zip(bare["losses"][half:], never["losses"][half:], strict=True))
    gap = bare["bits_per_byte"] - never["bits_per_byte"]
    return [
        f"Resumed from its checkpoint the run has "
        f"{'the same losses and weights to the last bit' if same else 'OTHER losses or weights'} "
        "as one that was never stopped.",
        f"Without the optimizer's state the loss is up to {jump:.3f} nats above the other's, and the run ends "
        f"{abs(gap):.3f} bits "
        f"a byte {'worse' if gap > 0 else 'better'}.",
        f"Where the data begins anew, the second half trains on the text of the first: it ends at {again['loss']:.3f} nats on "
        f"that and at "
        f"{again['bits_per_byte']:.3f} bits a byte on held-out text, the others at {never['loss']:.3f} and "
        f"{never['bits_per_byte']:.3f}.",
    ]


resume = Variation(
    expected="The same bits, where weights, optimizer state, schedule, random states and the place in the data are restored; "
    "Adam without "
    "its moments takes first steps of full size in all directions (Kingma and Ba 2015, algorithm 1).",
    variants={
        "never stopped": {"stops": False}, "resumed": {}, "no optimizer state": {"optimizer": False},
        "data from its start": {"position": False},
    },
    conclude=_shows, train=_stopped, measures=("loss", "bits_per_byte", "weights"),
)  # fmt: skip
