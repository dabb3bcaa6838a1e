"""A flipped bit of one process's weights: found by its replicas, undone, and the process named."""

from pathlib import Path

import pytest
import torch
from trainings import injected, result, trained

from bessemer.distributed.sharded_tensors import bit_sums
from bessemer.run.files import read_json_lines

FLIPS = """
import os, pathlib, sys, threading, time
def patch():
    while not hasattr(sys.modules.get("bessemer.train.trainer"), "Trainer"):
        time.sleep(0.001)
    import torch
    from bessemer.train.trainer import Trainer
    honest, done = Trainer.update, pathlib.Path(os.environ["FLIPPED"])
    def update(self, step, *more):
        rate = honest(self, step, *more)
        if step == 12 and not done.exists():
            done.touch()
            weight = next(self.model.parameters()).data
            weight = getattr(weight, "_local_tensor", weight).view(-1)
            weight.view(torch.int32)[5] ^= 1 << 22
        return rate
    Trainer.update = update
if os.environ.get("LOCAL_RANK") == os.environ.get("FLIPS"):
    threading.Thread(target=patch, daemon=True).start()
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.fault(21)
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    whole = torch.linspace(-2, 2, 48, dtype=dtype)
    before = bit_sums([("a", whole)])
    bits = whole.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
    for place in (0, 17, 47):
        for bit in range(8 * whole.element_size() - 1):
            bits[place] ^= 1 << bit
            assert bit_sums([("a", whole)]) != before
            bits[place] ^= 1 << bit
    assert bit_sums([("a", whole)]) == before == bit_sums([("a", whole.clone())])


@pytest.mark.long
@pytest.mark.parametrize(("processes", "flips", "steps"), [(2, 1, 30), (4, 2, 16)])
@pytest.mark.fault(21)
def test_a_flipped_bit_is_undone(
    made: Path, replicas: str, tmp_path: Path, processes: int, flips: int, steps: int
) -> None:
    fault = injected(tmp_path, FLIPS)
    name = f"flipped-{processes}"
    given = [f"parallel.replicate={processes}", "guard.compare_replicas_every=5", f"train.steps={steps}"]
    flipped = {**fault, "FLIPS": str(flips), "FLIPPED": str(tmp_path / "flipped")}
    if processes != 2:
        replicas = trained(made, "four-replicas", *given)
    trained(made, name, *given, environment=flipped)
    assert (tmp_path / "flipped").exists()
    found = read_json_lines(made.parent / "runs" / name / "incidents.jsonl")
    assert found[0]["what"] == "corruption"
    assert (found[0]["step"], found[0]["onset"]) == (15, 13), "checkpoints at 12, comparisons at 10, 12, 15"
    assert found[0]["action"].startswith("rolled back to step 12") and "the same steps again" in found[0]["action"]
    (redone,) = {row["redone_steps"] for row in read_json_lines(made.parent / "runs" / name / "time.jsonl")[-1:]}
    assert redone == 3, "13, 14 and 15"
    assert found[-1]["rank"] == flips and f"rank {flips}" in found[-1]["cause"]
    assert result(made, name) == result(made, replicas)
