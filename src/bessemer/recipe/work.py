"""How the corpus is worked out: the engine, its workers, and what is kept of rejected documents ([corpus])."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Section


class Work(Section):
    """Keys of [corpus] that say how the work is done. `engine`, `address` and `workers` change no document."""

    engine: Literal["local", "ray"] = Field(
        "local",
        description="Where the work is done: processes of this machine, or a Ray cluster; the result is the same.",
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="Address of the Ray cluster (host:port, ray://host:port or auto); left out: a cluster is started here. "
        "Its machines must see the run folder and the sources under the same paths.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="Processes that work at one time; left out: one for each core (of the cluster with ray).",
    )
    keep_rejected: Literal["excerpt", "text", "none"] = Field(
        "excerpt",
        description="What rejected/ holds of a document besides its place and reason: its beginning, its whole text, or "
        "nothing.",
    )

    @model_validator(mode="after")
    def _an_address_is_of_ray(self) -> Self:
        if self.address is not None and self.engine != "ray":
            raise ValueError('address: only a Ray cluster has one; set engine = "ray", or remove the address')
        return self
