"""The certificate of layouts: every layout trains equally; short here, with all layouts in the long tests."""

from pathlib import Path

import numpy as np
import pytest

from bessemer.run.files import read_json, write_json
from tests.benchmark_files import program
from tests.choose import long_but

certificate = program("layout_certificate")


@pytest.mark.parametrize(
    "layouts", long_but([["fsdp2, zero 3", "tp2"], ["dp2", "pp2, 1f1b", "cp2"]], ["fsdp2, zero 3", "tp2"])
)
def test_layouts_with_dropout_train_like_one_process(layouts: list[str], tmp_path: Path) -> None:
    settings = certificate.Scope().settings | {"steps": 3}
    scope = certificate.Scope(tuple(layouts), ("dropout",), ("fp64",), settings)
    results = certificate.certify(scope, tmp_path)
    assert [row["layout"] for row in results["rows"]] == layouts
    for row in results["rows"]:
        assert row["loss"] <= 1e-12 and row["weight"] <= 1e-12, row
    assert certificate.missed(results) == []
    # Finished runs are kept, and a changed value is detected.
    kept = tmp_path / "runs" / layouts[-1] / "dropout-fp64" / "run.json"
    values = read_json(kept)
    write_json(kept, values | {"losses": [loss + 1e-6 for loss in values["losses"]]})
    assert len(certificate.missed(certificate.certify(scope, tmp_path))) == 1
    write_json(kept, values | {"losses": [None, *values["losses"][1:]]})
    assert certificate.certify(scope, tmp_path)["rows"][-1]["loss"] == np.inf


@pytest.mark.long
def test_all_layouts_train_like_one_process(tmp_path: Path) -> None:
    """Run in fp64, where a difference is a fault; the committed results have fp32 and bf16 too."""
    settings = certificate.Scope().settings | {"steps": 2}
    results = certificate.certify(certificate.Scope(cases=("hard",), precisions=("fp64",), settings=settings), tmp_path)
    assert len(results["rows"]) == 23 + 7 and certificate.missed(results) == []


def test_the_committed_results_meet_their_targets() -> None:
    results = read_json(certificate.RESULTS)
    assert results["settings"] == certificate.Scope().settings
    assert {row["layout"] for row in results["rows"]} == set(certificate.LAYOUTS)
    assert certificate.missed(results) == []
    assert all("equal_steps" not in row for row in results["rows"] if row["precision"] == "fp64")
