"""Every family against `transformers`, both ways, in fp32 and fp64: logits, loss and every gradient.

The worst errors are published in docs/background/parity.md; `BESSEMER_WRITE_DOCS=1` writes that table anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import read_model, write_weights
from bessemer.run.files import write_json
from tests.model.float64 import Float64
from tests.model.parity import LENGTH, TOLERANCE, worst_errors
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).parents[2] / "docs" / "background/parity.md"

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
def table() -> Any:
    """Collects the rows; written to the docs when asked for."""
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    yield rows
    if os.environ.get("BESSEMER_WRITE_DOCS") and len(rows) == 4 * len(MODELS):
        head, _, _ = DOCS.read_text().partition("| model |")
        lines = ["| model | direction | precision | logits | loss | gradients |", "|---|---|---|---|---|---|"]
        for (name, direction, precision), errors in sorted(rows.items(), key=lambda row: list(MODELS).index(row[0][0])):
            lines.append(
                f"| {name} | {direction} | {precision} | " + " | ".join(f"{e:.0e}" for e in errors.values()) + " |"
            )
        DOCS.write_text(head + "\n".join(lines) + "\n")


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("direction", ["export", "import"])
@pytest.mark.parametrize("name", list(MODELS))
def test_equal_to_transformers(name: str, direction: str, precision: str, tmp_path: Path, table: Any) -> None:
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
            for parameter in random.parameters():
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
    rows = re.findall(r"^\| (.+?) \| (export|import) \| (fp32|fp64) \|", DOCS.read_text(), re.MULTILINE)
    assert set(rows) == {(name, way, precision) for name in MODELS for way in ("export", "import")
                         for precision in ("fp32", "fp64")}  # fmt: skip
