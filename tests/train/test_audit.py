"""The audit of the mixture: what the batches held, whatever phases and stops there were."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bessemer.tokens.loader import open_loader
from bessemer.train.mixture_audit import MixtureCounts, mixture_audit
from tests.tokens.token_samples import documents, recipe_of, store_of

SCHEDULE = "[[tokens.schedule]]\nfrom = 0.55\nweights = {a = 1, b = 4}\n"


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_audit_counts_what_the_batches_held(tmp_path: Path, packing: str) -> None:
    recipe = recipe_of(packing, more=SCHEDULE, steps=20, a="max_epochs = 3", b="")
    store = store_of(tmp_path, recipe, {"a": documents(1, 12), "b": documents(2, 40)})
    loader = open_loader(recipe, store)
    given, rows = MixtureCounts.zero(loader.mixture), []
    for step in range(20):
        if step == 7:  # as a checkpoint would keep it
            given = MixtureCounts.from_dict(given.to_dict())
        batch = loader.batch(8 * step, 8)
        given = given.plus(batch, loader.mixture)
        for slot in range(8):
            rows.append((8 * step + slot >= 88, int(batch.source[slot]), int((batch.targets[slot] >= 0).sum())))
    found = mixture_audit(loader.mixture, given, 160)
    for number, name in enumerate("ab"):
        mine = [row for row in rows if row[1] == number]
        source = found["sources"][name]
        assert source["sequences"] == len(mine)
        assert source["tokens"] == sum(row[2] for row in mine)
        assert source["epochs"] == len(mine) / loader.mixture.sequences[number]
        assert source["drawn_share"] == pytest.approx(source["tokens"] / sum(row[2] for row in rows))
        for late, phase in enumerate(found["phases"]):
            here = [row for row in mine if row[0] == bool(late)]
            assert phase["sources"][name]["sequences"] == len(here)
            assert phase["sources"][name]["tokens"] == sum(row[2] for row in here)
    assert found["sources"]["a"]["epochs"] <= 3
    assert [(phase["from"], phase["to"]) for phase in found["phases"]] == [(0, 88), (88, 160)]
    assert found["phases"][1]["sources"]["b"]["asked_share"] == 0.8
    assert found["largest_deviation"] < (0.02 if packing == "concatenate" else 0.1)
    assert found["follows_the_order"]


def test_a_reader_that_gives_something_else_is_found_out(tmp_path: Path) -> None:
    recipe = recipe_of("concatenate")
    loader = open_loader(recipe, store_of(tmp_path, recipe, {"a": documents(1, 12), "b": documents(2, 40)}))
    batch = loader.batch(0, 8)
    batch = replace(batch, source=np.zeros_like(batch.source))
    given = MixtureCounts.zero(loader.mixture).plus(batch, loader.mixture)
    found = mixture_audit(loader.mixture, given, 8)
    assert not found["follows_the_order"]
    assert found["sources"]["a"]["drawn_share"] == 1.0
    assert found["largest_deviation"] > 0.5
