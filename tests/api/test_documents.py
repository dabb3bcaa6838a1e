"""Documents and tokens from Python: lazy, equal to those of the stages, and usable as datasets of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bessemer as bs
from bessemer.common.errors import InputError
from bessemer.corpus.filters.base import BUILT_IN
from bessemer.tokens.shards import TokenStore
from tests.api.own_parts import NoWord
from tests.conftest import WORDS


def text(number: int) -> str:
    return " ".join(WORDS[(7 * number + place) % len(WORDS)] for place in range(number % 5 + 40)) + f" number {number}."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents, of which the last two equal the first and one has an unwanted word."""
    folder = tmp_path_factory.mktemp("files")
    texts = [*(text(number) for number in range(40)), text(0), text(0), f"{text(50)} unwanted"]
    (folder / "data.jsonl").write_text("".join(json.dumps({"body": one}) + "\n" for one in texts))
    return folder


@pytest.fixture(scope="module")
def docs(files: Path) -> Any:
    return bs.read(files / "*.jsonl", text_key="body").filter(NoWord(word="unwanted")).deduplicate(minhash=False)


@pytest.fixture(scope="module")
def tokens(docs: Any) -> Any:
    return docs.tokenize(vocabulary=300, sequence_length=16, held_out=0.2)


def test_documents_are_read_filtered_and_deduplicated(docs: Any, files: Path, tmp_path: Path) -> None:
    written = docs.write(tmp_path / "runs" / "x")
    assert sorted(row["text"] for row in written) == sorted(text(number) for number in range(40))
    assert written.statistics["totals"]["rejected"] == {"no_word.word": 1, "exact_duplicate": 2}
    assert {row["source"] for row in written} == {"text"} and len(written.take(3)) == 3
    assert written.path == tmp_path / "runs" / "x" and docs.path is None
    assert len(list(bs.read(files, text_key="body"))) == 43, "nothing is removed that was not asked for"
    assert [row["identity"] for row in docs] == [row["identity"] for row in written], "without a folder of its own"


def test_a_sample_builds_nothing(docs: Any) -> None:
    found = docs.sample(100)
    assert found["documents"] == 43 and found["sources"][0]["rejected"]["no_word.word"]["documents"] == 1


def test_a_filter_of_a_notebook_works_in_this_process(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    class Odd(bs.Filter):
        """Reject documents with an odd number of characters."""

        def judge(self, document: bs.Document) -> bs.Reject | None:
            seen.append(document.text)
            return bs.Reject() if len(document.text) % 2 else None

    docs = bs.read(files, text_key="body").filter(Odd())
    assert "Odd" in capsys.readouterr().err
    kept = [row["text"] for row in docs]
    assert kept and sorted(kept) == sorted(one for one in seen if len(one) % 2 == 0) and len(seen) == 43
    assert docs.statistics["totals"]["rejected"]["odd"] == 43 - len(kept)


def test_the_rule_sets_are_filters(files: Path) -> None:
    docs = bs.read(files, text_key="body").filter(bs.filters.GopherQuality(min_words=43))
    assert docs.keys["filters"] == [{"use": "gopher_quality", "min_words": 43}] and "gopher_quality" in BUILT_IN
    kept = [row["text"] for row in docs]
    assert 0 < len(kept) < 43 and all(len(one.split()) >= 43 for one in kept)


def test_tokens_equal_those_of_the_tokens_stage(tokens: Any, tmp_path: Path) -> None:
    lazy, tokens = tokens, tokens.write(tmp_path / "x")
    store = TokenStore.open(tmp_path / "x" / "tokens")
    assert tokens.store.digest == store.digest == lazy.store.digest == bs.open_tokens(tmp_path / "x").store.digest
    assert [one.identity for one in tokens] == [one.identity for one in store.documents("train")]
    assert tokens.num_tokens() + tokens.num_tokens("heldout") == sum(
        len(one.ids) for split in ("train", "heldout") for one in tokens.documents(split)
    )
    stage = tmp_path / "x" / "tokens" / "stage.json"
    before = stage.stat().st_mtime_ns
    lazy.write(tmp_path / "x")
    assert stage.stat().st_mtime_ns == before, "what is there is not written again"


def test_sequences_equal_those_of_the_torch_dataset(docs: Any, tokens: Any) -> None:
    torch = pytest.importorskip("torch")
    data = tokens.sequences(16)
    stream = np.concatenate([one.ids for one in tokens]).astype(np.int64)
    assert len(data) == (len(stream) - 1) // 16
    for number in (0, 5, len(data) - 1):
        assert np.array_equal(data[number]["input_ids"], stream[16 * number : 16 * number + 16])
        assert np.array_equal(data[number]["targets"], stream[16 * number + 1 : 16 * number + 17])
    batches = list(torch.utils.data.DataLoader(data, batch_size=4))
    assert batches[0]["input_ids"].shape == (4, 16) and batches[0]["input_ids"].dtype == torch.int64
    pytest.importorskip("datasets")
    assert isinstance(tokens.to_datasets(), torch.utils.data.IterableDataset)
    loader = torch.utils.data.DataLoader(tokens.to_datasets(), batch_size=None, num_workers=1)
    assert [row["identity"] for row in loader] == [one.identity for one in tokens]
    texts = torch.utils.data.DataLoader(docs.to_datasets(), batch_size=None)
    assert [row["text"] for row in texts] == [row["text"] for row in docs]


def test_datasets_have_the_same_documents(docs: Any, tokens: Any) -> None:
    datasets = pytest.importorskip("datasets")
    found = tokens.to_datasets("heldout")
    assert isinstance(found, datasets.IterableDataset)
    assert [(row["identity"], list(row["input_ids"])) for row in found] == [
        (one.identity, one.ids.tolist()) for one in tokens.documents("heldout")
    ]
    assert [row["text"] for row in docs.to_datasets()] == [row["text"] for row in docs]


def test_documents_and_tokens_have_a_readable_repr(docs: Any, tokens: Any, tmp_path: Path) -> None:
    lazy = bs.read("<b>").tokenize(vocabulary=300)
    assert "not written" in lazy._repr_html_() and "vocabulary" in lazy._repr_html_()
    assert "&lt;b&gt;" in bs.read("<b>")._repr_html_() and " number " in docs.write(tmp_path / "x")._repr_html_()
    assert "300" in tokens.write(tmp_path / "x")._repr_html_()


def test_wrong_input_raises_one_error(docs: Any, tokens: Any, files: Path, tmp_path: Path) -> None:
    class Local(bs.Filter):
        def judge(self, document: bs.Document) -> None:
            return None

    for ask, named in (
        (lambda: bs.read(files, text_keys="body"), "text_keys"),
        (lambda: docs.add(files), "text"),
        (lambda: docs.configure({"engine": "slurm"}).filter(Local()), "Local"),
        (lambda: docs.filter(Local()).configure({"engine": "ray"}), "Local"),
        (lambda: docs.filter(Local()).configure({"workers": 2}), "Local"),
        (lambda: docs.filter("gopher"), "str"),
        (lambda: docs.deduplicate(min_jacard=1), "min_jacard"),
        (lambda: docs.configure({"language.nope": 1}), "nope"),
        (lambda: docs.configure({"workers": object()}), "recipe"),
        (lambda: docs.sample(0), "sample"),
        (lambda: docs.tokenize(vocabulary=3), "vocabulary"),
        (lambda: docs.tokenize(vocabulary=100_000).write(tmp_path / "x"), "vocabulary"),
        (lambda: list(bs.read(tmp_path / "missing.txt")), "missing"),
        (lambda: bs.open_tokens(tmp_path / "none"), "none"),
        (lambda: tokens.documents("test"), "test"),
        (lambda: tokens.documents("train", "other"), "other"),
        (lambda: tokens.sequences(1 << 30), "sequences"),
    ):
        with pytest.raises(InputError, match=named):
            ask()
