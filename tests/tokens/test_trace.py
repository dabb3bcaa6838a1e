"""Tracing from documents to tokens and raw files, before training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bessemer.cli import run_command
from bessemer.run.directory import RunDirectory
from bessemer.tokens import trace
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer


def rows(run: RunDirectory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(run.corpus / "documents").to_pylist()
    return found


def test_every_document_is_traced_to_its_tokens(prepared: Path) -> None:
    run = RunDirectory(prepared / "runs" / "small")
    store = TokenStore.open(run.tokens)
    tokenizer = Tokenizer.load(run.tokens / "tokenizer.json", "<|endoftext|>")
    every = rows(run)
    assert len(every) == 120
    for row in every[::7]:
        found = trace.find_document(store, run.corpus, row["identity"], text=True)
        assert (found["source"], found["path"], found["place"]) == (row["source"], row["path"], "")
        assert found["text"] == row["text"][:300]
        shard = next(s for s in store.split(found["source"], found["split"]).shards if s.path.name == found["shard"])
        ids = shard.tokens[found["first_token"] : found["first_token"] + found["tokens"]]
        assert tokenizer.decode(ids[:-1].tolist()) == row["text"]


def test_the_command_needs_no_training(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(prepared / "runs" / "small")
    row = rows(run)[0]
    assert not run.recipe.exists()
    for of in (run.path, prepared / "small.toml"):
        assert run_command(["trace", str(of), "--document", row["identity"], "--text"]) == 0
        shown = capsys.readouterr().out
        assert row["path"] in shown
        assert row["text"][:40] in shown


def test_a_url_a_path_and_an_identity_name_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept and rejected documents; a name of several documents is an error that lists them."""
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(f"word{number * 1000 + place}" for place in range(60)) for number in range(4)]
    urls = [f'https://example.org/Stra\u00dfe?page={number}&x="%C3%9F"' for number in range(4)]
    lines = [{"text": text, "url": url} for text, url in zip(texts, urls, strict=True)]
    lines += [
        {"text": texts[0].upper(), "url": "https://example.org/copy"},
        {"text": "...", "url": "http://example.org/marks"},
    ]
    lines += [{"text": " ".join(f"more{place}" for place in range(60)), "url": urls[1]}, {"text": " ".join("ab" * 99)}]
    (tmp_path / "data" / "one").mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "data" / "one" / "b.txt").write_text(" ".join(f"other{place}" for place in range(60)))
    (tmp_path / "data" / "short.txt").write_text("+-" * 50)
    (tmp_path / "my.toml").write_text(
        '[run]\nname = "t"\n[[corpus.sources]]\nname = "s"\npaths = ["data"]\n[model]\ndepth = 1\n'
    )
    assert run_command(["corpus", "my.toml"]) == 0

    def traced(name: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert run_command(["trace", "runs/t", "--document", name, "--json"]) == code
        return json.loads(capsys.readouterr().out) if not code else {}

    for url in (urls[0], urls[3], "https://example.org/copy", "http://example.org/marks"):
        found = traced(url)
        assert (found["url"], found["path"]) == (url, "data/a.jsonl")
        assert traced(found["document"]) == traced(found["document"].upper()) | {"document": found["document"]} == found
    assert traced("http://example.org/marks")["reason"] == "not_text"
    (gone,) = (url for url in (urls[0], "https://example.org/copy") if traced(url).get("reason") == "exact_duplicate")
    for name, reason in (("one/b.txt", None), ("short.txt", "not_text")):
        for path in (f"data/{name}", str(tmp_path / "data" / name), Path(name).name):
            found = traced(path)
            assert (found["path"], found["url"], found.get("reason")) == (f"data/{name}", "", reason)
    for several in (urls[1], "data/a.jsonl"):
        traced(several, 2)
    for unknown in ("https://example.org/", "data/c.txt", "ort.txt", "0" * 32, "xyz"):
        traced(unknown, 2)
    rejected = pq.read_table(RunDirectory(tmp_path / "runs" / "t").corpus / "rejected").to_pylist()
    assert {row["url"] for row in rejected} == {gone, "http://example.org/marks", ""}
    (source,) = json.loads((tmp_path / "runs" / "t" / "corpus" / "statistics.json").read_text())["sources"]
    assert source["rejected"]["exact_duplicate"]["examples"][0]["url"] == gone


def test_shards_can_be_traced_without_the_corpus(prepared: Path, tmp_path: Path) -> None:
    run = RunDirectory(prepared / "runs" / "small")
    name = rows(run)[0]["identity"]
    shutil.copytree(run.tokens, tmp_path / "tokens")
    found = trace.find_document(TokenStore.open(tmp_path / "tokens"), tmp_path / "corpus", name)
    assert found["shard"].startswith("code-")
    assert "path" not in found
