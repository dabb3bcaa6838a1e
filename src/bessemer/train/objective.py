"""The objectives of a training: which tokens of a sequence a model reads and predicts, and the loss of each prediction.

Shapes: B sequences, T tokens of a sequence, N targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from bessemer.recipe import Train
from bessemer.recipe.uses import ExtensionBase

if TYPE_CHECKING:  # a recipe that names an objective is loaded without torch
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from bessemer.tokens.tokenizer import Tokenizer

    Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """A sequence of the training text.

    Attributes:
        inputs: Token ids, (T,) int64.
        targets: The token after each of them, (T,) int64; -1 for tokens that are not predicted, such as padding and user
            messages.
        starts: True where a document or the padding starts in a packed sequence, (T,) bool; None for other packings.
        random: A random generator that depends only on `run.seed` and the number of the sequence in the run, so that neither a
            resume nor the layout changes its numbers.
        tokenizer: The tokenizer, with `id_of(token)`, `end_of_text`, `mask_token` and `vocabulary`, the number of ids.
        is_text: True for the ids of text, False for special tokens, (V,) bool.
    """

    inputs: Ids
    targets: Ids
    starts: npt.NDArray[np.bool_] | None
    random: np.random.Generator
    tokenizer: Tokenizer
    is_text: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for some of the targets of a micro-batch.

    Attributes:
        logits: The logits, (N, V) float32, or float64 in a training in fp64.
        targets: The ids of the correct tokens, (N,) int64.
        inputs: The token ids of the micro-batch, (B, T) int64.
        sequence: The row of `inputs` that each target belongs to, (N,) int64.
        position: The position in that row, (N,) int64. A decoder has read the tokens up to it.
    """

    logits: Tensor
    targets: Tensor
    inputs: Tensor
    sequence: Tensor
    position: Tensor


class Objective(ExtensionBase):
    """The base of training objectives. Fields of a subclass are its settings.

    Held-out text is scored as `causal` scores a decoder and `masked` an encoder, whatever the objective, so that runs are
    comparable.

    Attributes:
        model: The kind of model that it trains: "decoder", "encoder" (whose attention sees both sides), or "either".
    """

    one_of = ("example", "loss")
    model: ClassVar[Literal["decoder", "encoder", "either"]] = "decoder"

    def example(self, sample: Sample) -> tuple[Ids, Ids]:
        """Return the token ids to read and those to predict, both (T,) int64; -1 for no target."""
        return sample.inputs, sample.targets

    def loss(self, predictions: Predictions) -> Tensor:
        """Return the loss of each target, (N,). It is called for a part of a micro-batch at a time."""
        import torch.nn.functional as F

        return F.cross_entropy(predictions.logits, predictions.targets, reduction="none")


class Causal(Objective):
    """The objective in which each token predicts the next one."""


class Classification(Objective):
    """The objective in which each text predicts its label."""

    model = "either"


BUILT_IN: Mapping[str, str] = {
    "causal": f"{__name__}:Causal", "masked": "bessemer.train.masking:Masked", "classify": f"{__name__}:Classification",
}  # fmt: skip


def objective_of(train: Train) -> Objective:
    """Return the objective of a recipe. Raises InputError for a class that cannot be used."""
    rule: Objective = train.objective_rule.rule
    return rule.model_copy(update=dict(train.masking)) if train.objective == "masked" else rule


def overrides(objective: Objective, method: str) -> bool:
    """Return True if the class of an objective overrides `method`, "example" or "loss"."""
    return getattr(type(objective), method) is not getattr(Objective, method)
