"""The public names: loaded when they are used, and the same ones for type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bessemer


def test_type_checkers_see_the_names_that_are_there() -> None:
    stub = ast.parse(Path(bessemer.__file__).with_suffix(".pyi").read_text())
    names = {
        alias.asname or alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names == set(bessemer.EXPORTS) <= set(dir(bessemer))
    for name in names:
        assert getattr(bessemer, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = bessemer.nothing


@pytest.mark.usefixtures("cold")
def test_the_package_itself_loads_nothing() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'pyarrow', 'rich'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, bessemer; assert not {heavy}, {heavy}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
