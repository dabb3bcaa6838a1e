"""Every family against `transformers`, both ways, in fp32 and fp64: logits, loss and every gradient.

The worst errors are published in docs/parity.md; `BESSEMER_WRITE_DOCS=1` writes that table anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.export import write_weights
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import hub_tensors, read_model
from bessemer.model.transformer import Transformer
from bessemer.run.files import write_json
from tests.model.float64 import Float64
from tests.model.samples import config, stirred

transformers = pytest.importorskip("transformers")
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}
LENGTH = 24

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


def tokens_and_targets(wanted: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, wanted.vocabulary, (3, LENGTH), generator=generator)
    if wanted.labels:
        return tokens, torch.randint(0, wanted.labels, (3,), generator=generator)
    return tokens, torch.randint(0, wanted.vocabulary, tokens.shape, generator=generator)


def our_logits(model: Transformer, tokens: Tensor) -> Tensor:
    if model.config.labels:
        found: Tensor = model.classifier(model(tokens), torch.full((len(tokens),), LENGTH))
        return found
    return model.logits(tokens)


def worst_errors(ours: Transformer, theirs: Any) -> dict[str, float]:
    """Largest differences of logits, loss and gradients; gradients relative to the largest of each tensor, or to a
    thousandth of the model's largest where a tensor's own are near zero (a key's bias has none: the softmax cancels it).
    """
    tokens, targets = tokens_and_targets(ours.config)
    for module in theirs.modules():  # whose rows of the padding token would have no gradients
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    found, wanted = our_logits(ours, tokens), theirs(tokens).logits
    losses = [torch.nn.functional.cross_entropy(x.flatten(0, -2), targets.flatten()) for x in (found, wanted)]
    for loss in losses:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    worst, floor = 0.0, 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for part in hub_tensors(ours, value=lambda name, parameter: parameter.grad):
        wanted_gradient = gradients[part.name]
        scale = max(float(wanted_gradient.abs().max()), floor)
        worst = max(worst, float((part.gather() - wanted_gradient).abs().max()) / scale)
    assert {part.name for part in hub_tensors(ours)} == {
        name for name, gradient in gradients.items() if gradient is not None
    }
    return {
        "logits": float((found - wanted).detach().abs().max()),
        "loss": float((losses[0] - losses[1]).detach().abs()),
        "gradients": worst,
    }


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
