import os
import sysconfig
from pathlib import Path

import pytest

from bessemer.corpus.files import find
from bessemer.errors import InputError
from bessemer.recipe import Source


def source(*paths: str | Path, format: str = "text", **more: object) -> Source:
    return Source.model_validate({"name": "s", "format": format, "paths": [str(path) for path in paths], **more})


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(of: Source) -> list[str]:
    return [file.name for file in find(of)]


def test_folders_are_read_recursively_by_suffix(data: Path) -> None:
    touch(data, "b.txt", "a/c.md", "a/d.py", ".hidden/e.txt", "__pycache__/f.txt", ".g.txt")
    assert names(source(data)) == ["data/a/c.md", "data/b.txt"]
    assert names(source(data, format="code")) == ["data/a/d.py"]
    assert names(source(data, suffixes=[".py", ".md"])) == ["data/a/c.md", "data/a/d.py"]


def test_a_file_named_in_full_is_taken_whatever_its_suffix(data: Path) -> None:
    touch(data, "a.log", "b.log")
    assert names(source(data / "a.log")) == ["a.log"]


def test_globs(data: Path) -> None:
    touch(data, "x/a.txt", "x/b.md", "y/c.txt")
    assert names(source(data / "*" / "*.txt")) == ["x/a.txt", "y/c.txt"]
    assert names(source(data / "**" / "*.md")) == ["x/b.md"]


def test_names_do_not_depend_on_where_the_data_lies(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two/deep"):
        touch(tmp_path / place, "d/a.txt", "e/a.txt")
        found.append(names(source(tmp_path / place / "d", tmp_path / place / "e")))
    assert found[0] == found[1] == ["d/a.txt", "e/a.txt"]


def test_symlink_loops_end(data: Path) -> None:
    touch(data, "a/x.txt")
    (data / "a" / "loop").symlink_to(data)
    assert names(source(data)) == ["data/a/x.txt"]


def test_pipes_are_not_opened(data: Path) -> None:
    touch(data, "a.txt")
    os.mkfifo(data / "pipe.txt")
    assert names(source(data)) == ["data/a.txt"]


def test_python_placeholders() -> None:
    found = find(source("python://stdlib", format="code", suffixes=[".py"]))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    by_name = {file.name: file for file in found}
    assert by_name["python://stdlib/argparse.py"].path == str(stdlib / "argparse.py")
    tops = {name.split("/")[3] for name in by_name}
    assert not tops & {"site-packages", "test", "idlelib"}
    assert "python://stdlib/pydoc_data/topics.py" not in by_name
    assert names(source("python://stdlib/json/*.py", format="code"))[0] == "python://stdlib/json/__init__.py"
    prose = names(source("python://stdlib", "python://site-packages", format="descriptions"))
    assert "python://stdlib/pydoc_data/topics.py" in prose
    assert any(name.startswith("python://site-packages/") and name.endswith("METADATA") for name in prose)
    assert not any(name.endswith(".txt") for name in prose)  # licences, word lists, tables


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such", "no/such: no such file or folder"),
        ("python://elsewhere", "python://stdlib and python://site-packages"),
        ("ftp://host/x", "only local paths"),
        ("{data}", r"no file of format text there; looked for \.txt \.md \.rst"),
        ("{data}/*.txt", r"no file of format text there"),
    ],
)
def test_errors(data: Path, path: str, message: str) -> None:
    touch(data, "a.bin")
    with pytest.raises(InputError, match=message) as caught:
        find(source(path.format(data=data)))
    assert "corpus.sources.s" in str(caught.value)
    assert "\n" not in str(caught.value)
