"""Folders listed and files hashed by tasks: what one process finds, in its order, with its errors."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from corpus_samples import prose, recipe

from bessemer.corpus import files, look, pipeline, walk, work, worker
from bessemer.corpus.files import File, listing
from bessemer.corpus.inputs import changed_files, content_digest, inputs_digest, listings_of
from bessemer.corpus.look import HashFiles, contents_by_source
from bessemer.corpus.walk import Place
from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, stage_facts


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost every folder is a task."""
    monkeypatch.setattr(walk, "LISTED_HERE", 2)
    monkeypatch.setattr(walk, "MAX_FILES", 5)
    monkeypatch.setattr(walk, "TASK_FOLDERS", 2)
    monkeypatch.setattr(look, "HASHED_BYTES", 3 * look.OPEN_COST)


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


@pytest.mark.parametrize("seed", range(12))
def test_the_order_is_that_of_one_walk(data: Path, tmp_path: Path, finely: None, seed: int) -> None:
    tree(data, seed)
    tasks: list[walk.ListFolders] = []

    def by_tasks(place: Place, groups: object) -> list[list[walk.Folder | str]]:
        made = [
            walk.ListFolders(tmp_path / "work", place, len(tasks) + at, group)
            for at, group in enumerate(groups)  # type: ignore[arg-type,var-annotated]
        ]
        tasks.extend(made)
        for task in reversed(made):
            task.run()
        return [task.load(walk.FOUND) for task in made]

    source = recipe({"name": "s", "format": "text", "paths": [str(data)], "exclude": ["vendor"]}).corpus.sources[0]
    place = Place(source, str(data), str(data.parent), ("vendor",))
    found = [file for file, _ in walk.walk(place, by_tasks)]
    assert [file.path for file in found] == by_os_walk(data, "vendor")
    assert len(tasks) > 5
    assert max(sum(len(one.files) for one in task.load(walk.FOUND) if not isinstance(one, str)) for task in tasks) < 40
    assert listing(source, by_tasks) == listing(source)


def of_tree(data: Path) -> Recipe:
    tree(data, 1)
    for number in range(12):
        (data / "a" / f"p{number}.txt").write_text(prose(number))
    return recipe({"name": "s", "format": "text", "paths": [str(data)]}, {"name": "t", "paths": [str(data / "a")]})


def test_a_folder_that_cannot_be_listed_is_named(
    data: Path, run: RunFolder, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, denied = of_tree(data), [str(data / name) for name in ("a", "z")]
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path in denied:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    messages = []
    for where in (None, run):
        with pytest.raises(InputError, match="this folder cannot be listed; grant read permission") as caught:
            listings_of(of.corpus, where)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(denied[0])
    assert not list(run.path.glob(".listing-*"))


def test_the_corpus_is_the_same(data: Path, tmp_path: Path, finely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of, run = of_tree(data), RunFolder(tmp_path / "run")
    done: list[str] = []
    whole = worker.run_tasks
    monkeypatch.setattr(worker, "run_tasks", lambda what, *more: done.append(what) or whole(what, *more))  # type: ignore[func-returns-value]
    (run.path / f"{work.LISTING}killed").mkdir(parents=True)
    pipeline.build(of, run)
    assert {"listing folders", "hashing files"} <= set(done)
    assert [path.name for path in run.path.iterdir()] == ["corpus"]
    assert stage_facts(run.corpus)["inputs"] == inputs_digest(of)
    assert stage_facts(run.corpus)["content"] == content_digest(of)
    assert changed_files(of, run) == {"missing": [], "changed": [], "added": []}


def test_hashes_are_not_made_twice(data: Path, tmp_path: Path, finely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of = of_tree(data)
    found = listings_of(of.corpus, None)
    first = contents_by_source(of.corpus, found, tmp_path)
    assert first == {name: files.contents(one.read) for name, one in found.items()}
    assert len(list((tmp_path / "contents").glob("*/*"))) > 8
    monkeypatch.setattr(HashFiles, "make", lambda *_: pytest.fail("hashed again"))
    assert contents_by_source(of.corpus, found, tmp_path) == first


def test_what_cannot_be_opened_is_known_by_its_time(tmp_path: Path) -> None:
    gone = [File(str(tmp_path / f"{number}"), f"{number}", 5, number) for number in range(100)]
    gone[3] = File("s3://b/x", "s3://b/x", 7, 9, "etag")
    (tmp_path / "5").write_text("there")
    rows = files.contents(gone)
    assert [row[:2] for row in rows] == [[file.name, file.size] for file in gone]
    assert [row[2] for row in rows[:5]] == ["0", "1", "2", "etag", "4"]
    assert len(rows[5][2]) == 64
