"""Programs and committed results of benchmarks/, and the reference measurements of the planner."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = Path(os.environ.get("BESSEMER_REFERENCE") or ROOT.parent / "shared" / "reference" / "planner")
needs_reference = pytest.mark.skipif(
    not (REFERENCE / "b200.json").is_file(), reason="no reference sets; BESSEMER_REFERENCE names their folder"
)


def program(name: str) -> ModuleType:
    """Import a file of benchmarks/. These files import each other by their bare names."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
