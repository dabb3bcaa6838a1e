"""The prefetched batches of a training, which a rollback sets back to an earlier step."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.common.extensions import UserCodeError
from bessemer.recipe import Batches
from bessemer.tokens.loader import Batch, Loader, prefetch


class BatchStream:
    """The batches of the steps up to the last one of the run.

    Attributes:
        sizes: The samples that each step reads.
    """

    def __init__(self, loader: Loader, sizes: Batches, steps: int) -> None:
        self._loader, self._steps = loader, steps
        self.sizes = sizes
        self._rolled_back_to: int | None = None

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield the batches after `step` steps; after a rollback, continue from its step."""
        while step < self._steps:
            sizes = self.sizes
            spans = ((sizes.first(n), sizes.sequences(n)) for n in range(step, self._steps))
            try:
                for batch in prefetch(self._loader, spans):
                    yield batch
                    step += 1
                    if self._rolled_back_to is not None:
                        step, self._rolled_back_to = self._rolled_back_to, None
                        break
            except UserCodeError as error:
                raise error.at_step(step + 1) from error

    def roll_back(self, step: int, sizes: Batches) -> None:
        """Continue from an earlier step with other batch sizes."""
        self.sizes, self._rolled_back_to = sizes, step
