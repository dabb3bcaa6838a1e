"""Public names, which load when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bessemer


def test_every_public_name_exists() -> None:
    assert set(bessemer.EXPORTS) <= set(dir(bessemer))
    for name in bessemer.EXPORTS:
        assert getattr(bessemer, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = bessemer.nothing


@pytest.mark.usefixtures("cold")
def test_importing_the_package_loads_no_submodules() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'pyarrow', 'rich'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, bessemer; assert not {heavy}, {heavy}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
