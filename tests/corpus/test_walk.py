"""The files below a folder, in the order of a walk, and their hashes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from corpus_samples import recipe

from bessemer.corpus import files, walk
from bessemer.corpus.files import File
from bessemer.corpus.inputs import listings_of
from bessemer.errors import InputError


def tree(root: Path, seed: int) -> None:
    """Folders within folders with files of many names, links to folders above, below and beside, and what is left out."""
    draw = random.Random(seed)
    folders = [root]
    root.mkdir(exist_ok=True)
    for number in range(40):
        name = draw.choice(["a", "b", "vendor", ".hidden", "__pycache__", "z"]) + str(number) * (number % 3 > 0)
        folder = draw.choice(folders) / name
        folder.mkdir(exist_ok=True)
        folders.append(folder)
    for number in range(120):
        (draw.choice(folders) / f"{draw.choice(['x', '.x', 'y'])}{number}{draw.choice(['.txt', '.png', ''])}").touch()
    for number in range(25):
        os.symlink(draw.choice(folders), draw.choice(folders) / f"{draw.choice('amz')}link{number}")
    os.symlink(root / "nowhere", root / "dangling.txt")
    os.mkfifo(root / "pipe.txt")


def by_os_walk(root: Path, left_out: str) -> list[str]:
    """The paths of one walk by Python's own."""
    seen, found = set(), []
    for folder, folders, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in ("__pycache__", left_out))
        found += [os.path.join(folder, name) for name in sorted(names) if name[0] != "."]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_one_walk(data: Path, seed: int) -> None:
    tree(data, seed)
    found = [file.path for file in walk.walk(str(data), str(data.parent), ("vendor",))]
    assert found == by_os_walk(data, "vendor")


def test_a_folder_that_cannot_be_listed_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(data, 1)
    of = recipe({"name": "s", "format": "text", "paths": [str(data)]})
    denied, scandir = [str(data / name) for name in ("a", "z")], os.scandir

    def refusing(path: str) -> object:
        if path in denied:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match="this folder cannot be listed; grant read permission") as caught:
        listings_of(of.corpus)
    assert denied[0] in str(caught.value)


def test_what_cannot_be_opened_is_known_by_its_time(tmp_path: Path) -> None:
    gone = [File(str(tmp_path / f"{number}"), f"{number}", 5, number) for number in range(100)]
    gone[3] = File("s3://b/x", "s3://b/x", 7, 9, "etag")
    (tmp_path / "5").write_text("there")
    rows = files.contents(gone)
    assert [row[:2] for row in rows] == [[file.name, file.size] for file in gone]
    assert [row[2] for row in rows[:5]] == ["0", "1", "2", "etag", "4"]
    assert len(rows[5][2]) == 64
