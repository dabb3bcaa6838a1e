"""Pack the packages that `make gpu` needs as wheels, for a machine without a network.

    python benchmarks/gpu_wheels.py --python 3.12      into build/gpu-wheels
    make gpu                                           on that machine, which unpacks the wheels from there

The default list covers the base packages and those that training on a GPU needs besides torch. --all also packs the packages that
`bessemer run` needs from raw text to the report, which are several times as large. Versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

NEEDED = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "tomli-w", "rich",
          "markdown-it-py", "mdurl", "pygments", "tokenizers", "safetensors", "jinja2", "markupsafe", "plotly",
          "narwhals", "tensorboard", "protobuf", "pytest", "iniconfig", "pluggy", "packaging", "axe-core-python",
          "torchao")  # fmt: skip
EXTRAS = ("corpus", "train", "report")  # extras of pyproject.toml for --all
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")  # fmt: skip
MAX_BYTES = 50 << 20
WHEELS = Path(__file__).parent.parent / "build" / "gpu-wheels"


def pinned(name: str) -> str:
    """Return the requirement with its version from constraints.txt, if it has one."""
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    known = {line.partition("==")[0].lower().replace("_", "-"): line.strip() for line in lines if "==" in line}
    return known.get(name, name)


def required(package: str, extras: Iterable[str], python: str, without: str) -> list[str]:
    """Return the names of a package's direct and indirect requirements on Linux, from installed metadata.

    Args:
        package: Package whose requirements are listed.
        extras: Extras of the package to include.
        python: Python version, such as 3.12.
        without: Package that the machine has already; it and its requirements are left out.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    machine = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }

    def direct(name: str, extras: Iterable[str]) -> list[Requirement]:
        lines = [Requirement(line) for line in requires(name) or []]
        return [
            one for one in lines
            if one.marker is None or any(one.marker.evaluate({**machine, "extra": extra}) for extra in ("", *extras))
        ]  # fmt: skip

    found, there = {package: set(extras)}, {canonicalize_name(one.name) for one in direct(without, ())}
    left = [package]
    while left:
        for one in direct(name := left.pop(), found[name]):
            of = canonicalize_name(one.name)
            if of != without and (of not in found or one.extras - found[of]):
                found[of] = found.get(of, set()) | one.extras
                left.append(of)
    return sorted(found.keys() - {package} - there)


def provide(names: Iterable[str], wheels: Path, site: Path) -> list[str]:
    """Make packages importable, unpacking those that are not installed from `wheels` into `site`.

    Returns:
        The names that are neither installed nor among the wheels.
    """
    sys.path.append(str(site))
    lacking = [name for name in names if not _is_there(name)]
    if lacking and (packed := sorted(map(str, wheels.glob("*.whl")))):
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*install, "--target", str(site), *packed], check=True)
        lacking = [name for name in names if not _is_there(name)]
    return lacking


def _is_there(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=WHEELS)
    parser.add_argument("--python", default="3.12", help="Python version of the other machine")
    parser.add_argument("--all", action="store_true", help="also pack what a run from raw text needs")
    parser.add_argument("--have", nargs="*", default=[], help="packages that the other machine has already")
    given = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", given.python):
        parser.error(f"--python must be a version such as 3.12, not {given.python!r}")
    more = required("bessemer", EXTRAS, given.python, without="torch") if given.all else []
    if unknown := sorted({*given.have} - {*NEEDED, *more}):
        parser.error(f"--have: {', '.join(unknown)}: not among the packed packages")
    names = [name for name in dict.fromkeys((*NEEDED, *more)) if name not in given.have]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(given.out),
    ]
    command += ["--python-version", given.python, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    failed = []
    for name in names:
        print(pinned(name), flush=True)
        if subprocess.run([*command, pinned(name)], check=False).returncode:
            failed.append(name)
    size = sum(path.stat().st_size for path in given.out.glob("*.whl"))
    print(f"{len(list(given.out.glob('*.whl')))} wheels, {size / 1e6:.1f} MB in {given.out}")
    if failed:
        sys.exit(f"no wheel for {', '.join(failed)}")
    if size > MAX_BYTES and not given.all:
        sys.exit(f"more than {MAX_BYTES >> 20} MiB: name packages that the machine has already with --have")


if __name__ == "__main__":
    main()
