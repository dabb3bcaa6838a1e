"""Every family compared with `transformers` in both directions, in fp32 and fp64: logits, loss and gradients.

`BESSEMER_WRITE_RESULTS=1` writes the largest errors to benchmarks/results/parity.json, which the documentation shows.
"""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import read_model, write_weights
from bessemer.run.files import write_json
from tests.benchmark_files import ROOT, results
from tests.model.float64 import Float64
from tests.model.parity import LENGTH, TOLERANCE, worst_errors
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
RESULTS = ROOT / "benchmarks" / "results" / "parity.json"
KEYS = ("model", "direction", "precision")

MODELS: dict[str, dict[str, Any]] = {
    name: {"family": family.name, **changes}
    for family in FAMILIES.values()
    for name, changes in family.examples.items()
}


def made(name: str) -> ModelConfig:
    changes = dict(MODELS[name])
    return config(**{**FAMILIES[changes.pop("family")].options, **changes})


def their_class(wanted: ModelConfig) -> Any:
    return getattr(transformers, to_hugging_face(wanted, 0)["architectures"][0])


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str, str], dict[str, float]]]:
    """Collect the errors, and write them if requested."""
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    yield rows
    if os.environ.get("BESSEMER_WRITE_RESULTS") and len(rows) == 4 * len(MODELS):
        ordered = sorted(rows.items(), key=lambda row: list(MODELS).index(row[0][0]))
        named = [dict(zip(KEYS, key, strict=True)) | errors for key, errors in ordered]
        write_json(RESULTS, {"transformers": transformers.__version__, "rows": named})


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("direction", ["export", "import"])
@pytest.mark.parametrize("name", list(MODELS))
def test_families_equal_transformers(name: str, direction: str, precision: str, tmp_path: Path, table: Any) -> None:
    wanted = made(name)
    if direction == "export":
        ours = stirred(wanted)
        write_weights(ours, tmp_path)
        write_json(tmp_path / "config.json", to_hugging_face(wanted, 0))
    else:
        torch.manual_seed(1)
        configuration = transformers.AutoConfig.for_model(**to_hugging_face(wanted, 0))
        random = their_class(wanted)(configuration)
        with torch.no_grad():
            biases = [buffer for name, buffer in random.named_buffers() if name.endswith("bias")]
            for parameter in (*random.parameters(), *biases):
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        random.save_pretrained(tmp_path)
        ours = read_model(tmp_path)
        assert ours.config == wanted.with_changes(max_positions=LENGTH)
    if precision == "fp32":
        theirs = their_class(wanted).from_pretrained(tmp_path, dtype=torch.float32)
        errors = worst_errors(ours, theirs.eval())
    else:
        with Float64():
            theirs = their_class(wanted).from_pretrained(tmp_path, dtype=torch.float64)
            errors = worst_errors(ours.double(), theirs.double().eval())
    table[name, direction, precision] = errors
    for what, error in errors.items():
        assert error <= TOLERANCE[precision], f"{what} differ by {error:.1e}"


def test_the_published_table_has_every_row() -> None:
    rows = {tuple(row[key] for key in KEYS) for row in results("parity")["rows"]}
    assert rows == set(product(MODELS, ("export", "import"), ("fp32", "fp64")))
