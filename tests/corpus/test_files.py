import bz2
import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from bessemer.common.errors import InputError
from bessemer.corpus.inputs import listings_of
from bessemer.corpus.readers.base import File
from bessemer.corpus.readers.files import contents, ending, find, listing
from bessemer.corpus.readers.parts import files_by_format
from bessemer.recipe import Source
from tests.corpus.corpus_samples import recipe


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
    for link, target in (("a/above", data), ("a/self", data / "a"), ("gone", data / "nowhere")):
        os.symlink(target, data / link)
    assert names(source(data)) == ["data/a/c.md", "data/b.txt"]
    assert names(source(data, format="code")) == ["data/a/d.py"]
    assert names(source(data, suffixes=[".py", ".md"])) == ["data/a/c.md", "data/a/d.py"]


def test_without_a_format_the_ending_decides(data: Path) -> None:
    touch(data, "a.TXT", "b.py", "c.xml", "dewiki-1-pages-articles.xml.bz2", "d.png", "e.jsonl.gz", "novel")
    (data / "tables.xml").write_text('<mediawiki version="0.10">\n  <page></page>\n</mediawiki>')
    (data / "tables.xml.bz2").write_bytes(bz2.compress((data / "tables.xml").read_bytes()))
    of = Source.model_validate({"name": "s", "paths": [str(data), str(data / "novel")]})
    kinds = {kind: [Path(file.path).name for file in files] for kind, files in files_by_format(of, find(of)).items()}
    dump = {"mediawiki": ["dewiki-1-pages-articles.xml.bz2", "tables.xml", "tables.xml.bz2"]}
    assert kinds == {"code": ["b.py"], "jsonl": ["e.jsonl.gz"], "text": ["a.TXT", "novel"]} | dump
    nothing = Source.model_validate({"name": "s", "paths": [str(data / "*.png")]})
    with pytest.raises(InputError, match="corpus.sources.s"):
        find(nothing)


def test_names_do_not_depend_on_the_folder_of_the_data(tmp_path: Path) -> None:
    found = []
    for place in ("one", "two/deep"):
        touch(tmp_path / place, "d/a.txt", "e/a.txt")
        found.append(names(source(tmp_path / place / "d", tmp_path / place / "e")))
    assert found[0] == found[1] == ["d/a.txt", "e/a.txt"]


WEB = ("a.js", "a.min.js", "node_modules/b.js", "src/vendor/c.js", "src/d.js", ".git/e.js")
CODE = {"format": "code", "exclude": ["node_modules", "vendor", "*.min.js"]}


@pytest.mark.parametrize(
    ("files", "paths", "settings", "expected"),
    [
        (("a.log", "b.log"), ("a.log",), {}, ["a.log"]),  # any suffix, if named in full
        (("x/a.txt", "x/b.md", "y/c.txt"), ("*/*.txt", "**/*.md"), {}, ["x/a.txt", "x/b.md", "y/c.txt"]),
        (("x/a.txt", "y/a.txt"), ("", "x", "x/a.txt", "*/*.txt"), {}, ["data/x/a.txt", "data/y/a.txt"]),  # once each
        (WEB, ("",), CODE, ["data/a.js", "data/src/d.js"]),
        (WEB, ("a.min.js",), CODE, ["a.min.js"]),
    ],
)  # fmt: skip
def test_paths_select_files(
    data: Path, files: tuple[str, ...], paths: tuple[str, ...], settings: dict[str, Any], expected: list[str]
) -> None:
    touch(data, *files)
    assert sorted(names(source(*(data / path for path in paths), **settings))) == expected


def test_the_folders_of_python_and_two_files_that_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(
        tmp_path / "std", "a.py", "json/b.py", "test/c.py", "idlelib/d.py", "site-packages/e.py", "pydoc_data/topics.py"
    )
    touch(tmp_path, "pure/p/METADATA", "platform/p/METADATA", "pure/p/LICENSE.txt", "pure/p/tests/x.md")
    folders = {"stdlib": "std", "purelib": "pure", "platlib": "platform"}
    paths = {key: str(tmp_path / folder) for key, folder in folders.items()}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    assert names(source("python://stdlib", format="code")) == ["python://stdlib/a.py", "python://stdlib/json/b.py"]
    assert names(source("python://stdlib/json/*.py", format="code")) == ["python://stdlib/json/b.py"]
    found = names(source("python://stdlib", "python://site-packages", format="descriptions"))
    packages = ["python://site-packages/p/METADATA", "python://site-packages~2/p/METADATA"]
    assert found == [*packages, "python://stdlib/pydoc_data/topics.py"]


@pytest.mark.parametrize("path", ["no/such", "python://elsewhere", "ftp://host/x", "{data}", "{data}/*.txt"])
def test_unusable_paths_are_errors(data: Path, path: str) -> None:
    touch(data, "a.bin")
    with pytest.raises(InputError, match=r"corpus\.sources\.s"):
        find(source(path.format(data=data)))


ENDINGS = {  # files of a folder by format
    "jsonl": ["a.JSONL", "b.ndjson", "c.json.XZ", "d.jsonl.bz2", "e.jsonl.zstd"],
    "parquet": ["f.Parquet"],
    "html": ["i.HTML", "j.htm.gz"],
    "code": ["l.R"],
    "mediawiki": ["enwiki-20240101-pages-articles-multistream1.xml-p1p41242.bz2", "m.xml-p1p41.BZ2", "x-pages.xml.bz2"],
    "descriptions": ["METADATA"],
    "warc": ["CC-MAIN-0.warc.gz", "n.warc", "o.warc.zst", "p.warc.wet.gz"],
    "text": ["k.TXT.xz"],
}


def test_files_are_found_by_their_endings_whatever_case_and_compression(data: Path) -> None:
    index = "enwiki-20240101-pages-articles-multistream-index1.txt-p1p41242.bz2"
    touch(data, *(name for some in ENDINGS.values() for name in some), index, "g.jsonl.zip", "h.tar.gz", "metadata")
    assert {format: names(source(data, format=format)) for format in ENDINGS} == {
        format: [f"data/{name}" for name in some] for format, some in ENDINGS.items()
    }
    assert names(source(data, suffixes=[".Zip"])) == ["data/g.jsonl.zip"]


def test_unread_files_are_listed(data: Path) -> None:
    touch(data, "a.txt", "b.PDF", "c.tar.gz", "d", "x/e.pdf", ".git/f.pdf", ".hidden.pdf", "skip/g.pdf")
    os.mkfifo(data / "pipe.txt")
    found = listing(source(data, exclude=["skip"]))
    assert [file.name for file in found.read] == ["data/a.txt"]
    others = ("b.PDF", "c.tar.gz", "d", "pipe.txt", "x/e.pdf")
    assert [file.name for file in found.other] == [f"data/{name}" for name in others]
    assert [ending(file.name) for file in found.other] == [".pdf", ".tar.gz", "no ending", ".txt", ".pdf"]


def test_a_folder_that_cannot_be_listed_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(data, "a/x.txt", "b/y.txt", "z/x.txt")
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


def test_an_unreadable_file_is_identified_by_its_time(tmp_path: Path) -> None:
    gone = [File(str(tmp_path / f"{number}"), f"{number}", 5, number) for number in range(100)]
    gone[3] = File("s3://b/x", "s3://b/x", 7, 9, "etag")
    (tmp_path / "5").write_text("there")
    rows = contents(gone)
    assert [row[:2] for row in rows] == [[file.name, file.size] for file in gone]
    assert [row[2] for row in rows[:5]] == ["0", "1", "2", "etag", "4"]
    assert len(rows[5][2]) == 64
