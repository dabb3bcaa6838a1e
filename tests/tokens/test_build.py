"""The tokens stage as a whole: equal shards for any split of the work, with any tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bessemer.cli import run_command
from bessemer.common.errors import BessemerError
from bessemer.recipe import Recipe, load
from bessemer.run.directory import RunDirectory
from bessemer.tokens import build
from bessemer.tokens.held_out import held_out
from bessemer.tokens.shards import TokenStore
from tests.tokens.tokenizer_samples import ENDS, every_kind


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files that training reads."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".idx", ".lbl", ".npy") or path.name == "tokenizer.json"
    }


@pytest.fixture
def here(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared run without its tokens."""
    shutil.copytree(prepared / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "small" / "tokens")
    return tmp_path


def recipe_of(prepared: Path, here: Path, *more: str) -> tuple[Recipe, RunDirectory]:
    recipe = load(prepared / "small.toml", [f'run.dir="{here / "runs"}"', *more])
    return recipe, RunDirectory(recipe.run.folder)


def recipe_with(prepared: Path, here: Path, name: str) -> Path:
    """Return the prepared recipe with another kind of tokenizer."""
    every_kind()[name].save(str(here / "tokenizer.json"))
    text = (prepared / "small.toml").read_text().replace("vocabulary = 400", f'path = "{here / "tokenizer.json"}"')
    end = ENDS.get(name, "<|endoftext|>")
    (here / "other.toml").write_text(text.replace("[tokenizer]", f'[tokenizer]\nend_of_text = "{end}"'))
    return here / "other.toml"


class Killed(BaseException):
    pass


def test_work_on_other_inputs_or_damaged_work_is_repeated(
    prepared: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe, run), train, trainings = recipe_of(prepared, here), build.Tokenizer.train, list[int]()

    def killed_build() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(build, "mark_stage", lambda *_, **facts: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                build.build(recipe, run)

    killed_build()
    work = run.path / "tokens.work"
    assert not run.tokens.exists()
    with monkeypatch.context() as patched:
        patched.setattr(build.Tokenizer, "train", lambda *given: trainings.append(1) or train(*given))
        build.build(recipe, run)
    assert not trainings and not work.exists()
    assert hashes(run.tokens) == hashes(prepared / "runs" / "small" / "tokens")
    killed_build()
    other, run = recipe_of(prepared, here, "tokens.held_out=0.3")
    build.build(other, run)
    assert hashes(run.tokens) != hashes(prepared / "runs" / "small" / "tokens")
    TokenStore.open(run.tokens).verify()


def test_tokens_that_do_not_cover_the_text_are_an_error(
    prepared: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = recipe_of(prepared, here)
    encoded = build.Tokenizer.encode_batch
    monkeypatch.setattr(build.Tokenizer, "encode_batch", lambda self, texts: [ids[1:] for ids in encoded(self, texts)])
    with pytest.raises(BessemerError, match=r"document [0-9a-f]{32} of code"):
        build.build(recipe, run)


def test_special_tokens_have_stable_ids(prepared: Path, here: Path) -> None:
    names = '["<|user|>", "<|assistant|>"]'
    for more in ((), ('tokenizer.pattern="gpt2"', 'tokenizer.digits="single"', "tokenizer.prefix_space=true")):
        recipe, run = recipe_of(prepared, here, f"tokenizer.special_tokens={names}", *more)
        made = build.build(recipe, run).manifest["tokenizer"]
        tokenizer = build.Tokenizer.load(run.tokens / "tokenizer.json", "<|endoftext|>")
        assert tokenizer.special == {0: "<|endoftext|>", 1: "<|user|>", 2: "<|assistant|>"}
        assert tokenizer.encode_marked("<|user|>")[-1] == 1 and 1 not in tokenizer.encode("<|user|>")
        assert made["counts_bytes"] and made["came_back"] == 1.0
        assert tokenizer.decode(tokenizer.encode("a  b12\n")) == "a  b12\n"


@pytest.mark.parametrize(("name", "counts"), [("llama", True), ("nfc", True), ("bert", False), ("unigram", False)])
def test_bits_per_byte_need_tokens_that_cover_the_text(prepared: Path, here: Path, name: str, counts: bool) -> None:
    recipe = load(recipe_with(prepared, here, name), [f'run.dir="{here / "runs"}"'])
    run = RunDirectory(recipe.run.folder)
    facts = build.build(recipe, run).manifest["tokenizer"]
    assert facts["counts_bytes"] is counts
    store = TokenStore.open(run.tokens)
    assert store.counts_bytes is counts
    parts = held_out(store, 32)
    assert (sum(int(part.bytes.sum()) for part in parts) > 0) is counts
    if counts:
        for part in parts:
            first = int(store.token_bytes[part.inputs[0, 0]])  # no target: the first token of all
            whole = store.manifest["sources"][part.source]["heldout"]["bytes"]
            assert int(part.bytes.sum()) == whole - first + len(store.text_prefix)
    assert facts["text_prefix"] == (" " if name in ("llama", "unigram") else "")


def test_a_run_without_bits_per_byte(prepared: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", f'run.dir="{here / "runs"}"', "--set", "train.steps=2"]
    assert run_command(["run", str(recipe_with(prepared, here, "bert")), *sets]) == 0
    found = json.loads((here / "runs" / "small" / "evaluation.json").read_text())
    assert found["bits_per_byte"] is None and found["ngram"] is None and found["loss"] > 0
    assert "no bits per byte" in (here / "runs" / "small" / "report.html").read_text()


def test_the_held_out_split_has_its_own_seed(prepared: Path, here: Path) -> None:
    wanted = hashes(prepared / "runs" / "small" / "tokens")
    for keys, same in ((("run.seed=4",), True), (("tokens.seed=4",), False)):
        recipe, run = recipe_of(prepared, here, *keys)
        build.build(recipe, run)
        assert (hashes(run.tokens) == wanted) is same


@pytest.mark.parametrize("name", ["unigram", "llama", "bert", "gpt4"])
def test_special_tokens_in_documents_are_text_and_counted(here: Path, name: str) -> None:
    every_kind()[name].save(str(here / "tokenizer.json"))
    end = ENDS.get(name, "<|endoftext|>")
    lines = (f"line {n} of a text{f' with {end} in it{end}' * (n % 4 == 0)}, and more of it" * 2 for n in range(80))
    (here / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    recipe = here / "spelled.toml"
    recipe.write_text(
        f'[run]\nname = "spelled"\ndir = "{here}"\n[[corpus.sources]]\nname = "s"\npaths = ["{here}/text.jsonl"]\n'
        f"[corpus.dedup]\nminhash = false\n[corpus.rules]\nmin_characters = 1\n[tokenizer]\n"
        f'path = "{here}/tokenizer.json"\nend_of_text = "{end}"\n[tokens]\nsequence_length = 16\nheld_out = 0.2\n'
    )
    assert [run_command([stage, str(recipe)]) for stage in ("corpus", "tokens")] == [0, 0]
    store = TokenStore.open(here / "spelled" / "tokens")
    assert store.manifest["spelled_special_tokens"] == {end: 20}
    shards = [shard for split in ("train", "heldout") for shard in store.split("s", split).shards]
    ends = sum(int((np.asarray(shard.tokens) == store.end_of_text).sum()) for shard in shards)
    assert sum(len(shard.offsets) - 1 for shard in shards) == ends == 80
