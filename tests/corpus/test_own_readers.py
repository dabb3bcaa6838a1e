"""Readers of a recipe: the one of docs/how-to/own-reader.md, changes of it, and failures."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from corpus_samples import page_files, prose, subtitles

from bessemer.cli import run_command
from bessemer.common import extensions

BLOCKS = page_files("how-to/own-reader.md")
READER = BLOCKS["subtitles.py"]
HEAD = '[run]\nname = "t"\ndir = "runs"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader and the recipe of the page, with 20 films, one damaged and one compressed."""
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subtitles.py").write_text(READER)
    (tmp_path / "films.toml").write_text(HEAD + BLOCKS["films.toml"])
    (tmp_path / "films").mkdir()
    for number in range(18):
        (tmp_path / "films" / f"{number}.srt").write_text(subtitles(f"[music]\n{prose(number)}"))
    (tmp_path / "films" / "bad.SRT").write_text("1\nno times\nText")
    (tmp_path / "films" / "packed.srt.gz").write_bytes(gzip.compress(subtitles(f"[music]\n{prose(18)}").encode()))
    (tmp_path / "films" / "other.txt").write_text("of no film")
    return tmp_path


def rows(project: Path, kind: str) -> list[dict[str, Any]]:
    return list(pq.read_table(project / "runs" / "t" / "corpus" / kind).to_pylist())


def change(project: Path, old: str, new: str, name: str = "subtitles.py") -> None:
    text = (project / name).read_text()
    assert old in text
    (project / name).write_text(text.replace(old, new))


def failure(project: Path, capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """Return the error of a build, which leaves nothing behind."""
    assert run_command(["corpus", "films.toml", *arguments]) == code
    assert not (project / "runs" / "t" / "corpus").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bessemer: ")]
    return line


def test_another_setting_or_class_makes_another_corpus(project: Path) -> None:
    assert run_command(["corpus", "films.toml", "--set", "corpus.sources.films.reader={}"]) == 0
    assert not any("[music]" in row["text"] for row in rows(project, "documents"))
    change(project, 'line[:1] != "["', "True")
    extensions._load.cache_clear()
    assert run_command(["corpus", "films.toml", "--set", "corpus.sources.films.reader={}"]) == 0
    assert all("[music]" in row["text"] for row in rows(project, "documents"))


SPLIT = """
    def split(self, file):
        return [self.part(file, half, size=file.size // 2) for half in range(2)]

    def read(self, part: Part):
        yield Document(key=f"half {part.start}", num_bytes=part.size, text=f"The half {part.start} of {part.name}.")
"""


def test_parts_of_a_file_are_read_independently(project: Path) -> None:
    (project / "subtitles.py").write_text(READER.partition("    def read")[0] + SPLIT)
    assert run_command(["corpus", "films.toml"]) == 0
    assert {row["place"] for row in rows(project, "documents")} == {"half 0", "half 1"}
    assert len(rows(project, "documents")) == 40


FAULTS = {  # changes of the code: (old, new, exit code, name in the error)
    "a fault": ("spoken = []", "spoken = None", 1, ["subtitles.py, line", "Subtitles.read: TypeError", "films/"]),
    "no document": ("yield Document", "yield dict", 1, ["subtitles.py", "Subtitles.read", "not Document", "films/"]),
    "a key twice": ("        yield", "        for _ in range(2): yield", 1, ["Subtitles.read", "key", "films/"]),
    "a fault in split": ("    def read", "    def split(self, file):\n        return [self.no]\n\n    def read", 1,
                         ["subtitles.py, line", "Subtitles.split: AttributeError", "films/"]),
    "another signature": ("def read(self, part: Part)", "def read(self)", 2, ["corpus.sources.films.format", "Subtitles.read"]),
    "no read": ("def read", "def reads", 2, ["corpus.sources.films.format", "Subtitles lacks the method read"]),
    "no reader": ("(Reader)", "", 2, ["corpus.sources.films.format", "Subtitles", "bessemer.Reader"]),
    "an import that fails": ("from bessemer", "import no_such_module\nfrom bessemer", 2,
                             ["corpus.sources.films.format", "subtitles.py", "no_such_module"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_the_class_is_one_error_that_names_it(
    kind: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, code, named = FAULTS[kind]
    change(project, old, new)
    line = failure(project, capsys, code=code)
    assert all(word in line for word in named), line


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("reader", "{has_sound=true}", "films.reader.has_sound: unknown key; did you mean"),
        ("reader", "{has_sounds=3}", "films.reader.has_sounds: should be true or false"),
        ("format", "subtitle:Subtitles", "No such file"),
        ("format", "subtitles", "readers: there is no 'subtitles'"),
        ("label_key", "kind", "label_key"),
        ("encoding", "cp1252", "encoding"),
        ("text_key", "['a', 'b']", "text_key"),
    ],
)
def test_invalid_keys_are_named(
    key: str, value: str, named: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in failure(project, capsys, "--set", f"corpus.sources.films.{key}={value}", code=2)


def test_settings_without_a_format_are_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(project, 'format = "subtitles:Subtitles"\n', "", "films.toml")
    assert "corpus.sources.films.reader" in failure(project, capsys, code=2).replace(": reader", ".reader")


def test_a_name_that_clashes_with_a_format_is_an_error(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = project / "packages" / "subs-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: subs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[bessemer.readers]\ntext = subtitles:Subtitles\nsrt = subtitles:Subtitles\n"
    )
    monkeypatch.syspath_prepend(project / "packages")
    monkeypatch.syspath_prepend(project)
    assert "subs 1.2" in failure(project, capsys, "--set", "corpus.sources.films.format=text", code=2)
    assert run_command(["corpus", "films.toml", "--set", "corpus.sources.films.format=srt"]) == 0
    assert len(rows(project, "documents")) == 19
