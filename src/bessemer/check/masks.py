"""Checks of labels and attention masks, on batches of the real loader and the trained model.

A check changes a token, and hidden states that must not depend on it have to stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from bessemer.check.rows import CheckRow, judge
from bessemer.common.console import counted
from bessemer.recipe import ResolvedRecipe
from bessemer.tokens.loader import Batch, Bools, Loader
from bessemer.tokens.packing import Ints
from bessemer.tokens.shards import TokenStore
from bessemer.train.trainer import Trainer

TOPIC = "labels and masks"
SEARCHED = 256  # sequences that are searched for a document border
PLACES = 6  # tokens that are changed
# Largest ratio of a forbidden change of a hidden state to the changes elsewhere. It is not 0 because kernels of other shapes
# round differently.
LEAK = 1e-6


def mask_rows(recipe: ResolvedRecipe, trainer: Trainer, loader: Loader, store: TokenStore) -> Iterator[CheckRow]:
    """Yield the rows about targets, causality and document masks."""
    batch = loader.batch(0, min(SEARCHED, sum(loader.mixture.sequences)))
    if recipe.train.objective == "classify":  # a text has one label and no token targets
        return
    if recipe.train.objective_rule.is_built_in:  # a user's objective defines its own targets
        yield _targets(recipe, batch)
    with torch.no_grad(), _every_path_open(trainer):
        if trainer.model.config.causal:
            yield _future(trainer, batch.row(0))
        yield _documents(recipe, trainer, batch, store.end_of_text)


@contextmanager
def _every_path_open(trainer: Trainer) -> Iterator[None]:
    """Replace weight matrices that are all zero by noise, because they would hide the effect of attention.

    The output matrices of attention often start at zero. They are zero again at exit.
    """
    closed = [p for p in trainer.model.parameters() if p.ndim > 1 and not p.any()]
    for number, parameter in enumerate(closed):
        generator = torch.Generator(parameter.device).manual_seed(number)
        parameter.normal_(0.0, 0.02, generator=generator)
    try:
        yield
    finally:
        for parameter in closed:
            parameter.zero_()


def _targets(recipe: ResolvedRecipe, batch: Batch) -> CheckRow:
    """Check that targets are the next tokens, or the hidden tokens of a masked model."""
    inputs, targets = batch.inputs, batch.targets
    if recipe.train.objective == "masked":
        hidden, share = targets >= 0, float((targets >= 0).mean())
        kept = float((inputs[hidden] == targets[hidden]).mean())
        holds = abs(share - recipe.train.masking.share) < 0.05 and kept < 0.5
        return judge(TOPIC, "targets are the hidden tokens", holds,
                      f"{share:.1%} of the tokens are targets, {kept:.0%} of these stay visible")  # fmt: skip
    follows = targets[:, :-1] == inputs[:, 1:]
    has_target = targets[:, :-1] >= 0
    if batch.starts is not None:
        has_target &= ~batch.starts[:, 1:]  # the first input of a segment is the token before the segment
    wrong = int((has_target & ~follows).sum())
    text = f"{counted(int(has_target.sum()), 'target')} of {counted(len(inputs), 'sequence')}, {wrong} of them not the next input"
    return judge(TOPIC, "targets are shifted by one", wrong == 0 and bool(has_target.any()), text)


def _future(trainer: Trainer, batch: Batch) -> CheckRow:
    """Check, at several positions, that changing a token changes no hidden state before it."""
    length = batch.inputs.shape[1]
    ordinary = np.flatnonzero(batch.inputs[0] != trainer.end_of_text)[1:]  # changing a border would change the masks
    places = sorted({int(ordinary[np.argmin(abs(ordinary - at))]) for at in np.linspace(1, length - 1, PLACES)})
    whole, leak, seen = hidden_states(trainer, batch.inputs, batch.starts), 0.0, 0.0
    for index in places:
        moved = _moved(trainer, whole, batch, index)
        leak = max(leak, float(moved[:index].max()))
        seen = max([seen, *moved[index + 1 :].tolist()])
    text = f"token changed at {counted(len(places), 'place')}: states before it move by {leak:.1e}, after it by up to {seen:.1e}"
    return judge(TOPIC, "no token sees the future", leak <= LEAK * seen and seen > 0, text)


def _documents(recipe: ResolvedRecipe, trainer: Trainer, batch: Batch, end_of_text: int) -> CheckRow:
    """Check that changing a token changes no hidden state of the next document; a warning if the recipe allows it."""
    name = "no token sees another document"
    row, begin = _border(batch, end_of_text)
    if row < 0:
        text = f"no document ends within the first {counted(len(batch.inputs), 'sequence')}"
        return CheckRow(TOPIC, name, "not here", text)
    one = batch.row(row)
    changed = begin - 2  # leaves one token before the border that does attend to the changed one
    moved = _moved(trainer, hidden_states(trainer, one.inputs, one.starts), one, changed)
    leak, effect = float(moved[begin:].max()), float(moved[changed + 1 : begin].max())
    text = f"a token before the border at {begin} of sequence {row} changed: states after it move by {leak:.1e}"
    if not recipe.tokens.document_mask:
        text += "; attention crosses documents, as tokens.document_mask = false says"
        return CheckRow(TOPIC, name, "warn", text)
    return judge(TOPIC, name, leak <= LEAK * effect and effect > 0, f"{text}, those between by {effect:.1e}")


def _border(batch: Batch, end_of_text: int) -> tuple[int, int]:
    """Return a sequence and the position where its second document begins, or (-1, 0) if there is none.

    At least two tokens are on each side of the border.
    """
    for row, inputs in enumerate(batch.inputs):
        if batch.starts is None:
            begins = np.flatnonzero(inputs == end_of_text) + 1
        else:
            last = len(inputs) if batch.real_lengths is None else int(batch.real_lengths[row])
            begins = np.flatnonzero(batch.starts[row][:last])
        inside = begins[(begins >= 3) & (begins < len(inputs) - 1)]
        if len(inside):
            return row, int(inside[0])
    return -1, 0


def _moved(trainer: Trainer, whole: Tensor, batch: Batch, index: int) -> Tensor:
    """Return the largest change of each hidden state of the first sequence, (T,), when its token at `index` changes.

    `whole` has the hidden states before the change.
    """
    other = batch.inputs.copy()
    other[0, index] = (other[0, index] + 1) % trainer.end_of_text if trainer.end_of_text > 1 else other[0, index] + 1
    return (hidden_states(trainer, other, batch.starts) - whole).abs().amax(-1)[0]


def hidden_states(trainer: Trainer, inputs: Ints, starts: Bools | None) -> Tensor:
    """Return the hidden states of sequences after the final norm, in fp32, (B, T, D)."""
    place = trainer.device.torch_device
    starts_BT = None if starts is None else torch.from_numpy(starts).to(place)
    with trainer.autocast():
        return trainer.hidden(torch.from_numpy(inputs.astype(np.int64)).to(place), starts_BT).float()
