"""Verdicts on documents, compared with brute force: in any order, and with every rule for what is kept."""

import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose
from dedup_samples import KEPT, Document, all_pairs_components, document, edited, jaccard, search

from bessemer.common.errors import InputError
from bessemer.corpus.dedup import compare, keys
from bessemer.corpus.dedup import search as search_steps
from bessemer.corpus.dedup.task import EXACT, NEAR, ParquetPart
from bessemer.corpus.global_steps import CorpusDocuments, perform_here, run_step
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import Task

SENSITIVE = {"bands": 40, "rows": 4}
"""Settings that find a Jaccard of 0.6 with 99.6% and 0.75 always, and so everything that brute force finds."""


def families(seed: int, num_families: int = 12, num_words: int = 120) -> list[Document]:
    """Return families of texts that drift apart: each text is an edit of an earlier one."""
    draw = random.Random(seed)
    documents: list[Document] = []
    for family in range(num_families):
        versions = [prose(1000 * seed + family, num_words).split()]
        for _ in range(draw.randrange(8)):
            versions.append(edited(draw.choice(versions), draw.randrange(6), draw))
        documents += [document(f"{family}-{i}", " ".join(words)) for i, words in enumerate(versions)]
    draw.shuffle(documents)
    return documents


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_removed_documents_equal_those_of_brute_force(seed: int, earlier: bool, tmp_path: Path) -> None:
    """The reference keeps a document unless it is similar to a kept one, from the longest on; earlier documents come first."""
    documents = families(seed)
    before = documents[::5] if earlier else []
    now = [row for row in documents if row not in before]
    against: tuple[str, ...] = ()
    if before:
        pq.write_table(pa.Table.from_pylist(before), tmp_path / "before.parquet")
        against = (str(tmp_path),)
    settings = Dedup(exact=False, min_jaccard=0.75, against=against, **SENSITIVE)
    found, _ = search(now, settings, tmp_path / "work", size=30)
    texts = {row["identity"]: row["text"] for row in documents}
    kept, expected = [row["identity"] for row in before], {}
    for row in sorted(now, key=lambda row: (-row["characters"], row["identity"])):
        alike = [name for name in kept if jaccard(texts[name], row["text"]) >= 0.75]
        if not alike:
            kept.append(row["identity"])
        expected[row["identity"]] = (NEAR if alike else KEPT, {*alike} or {row["identity"]})
    linked = all_pairs_components([row["text"] for row in documents], 0.75)
    assert len(kept) > len(set(linked)), "more than one document of some components stays"
    assert any(verdict == NEAR for verdict, _ in expected.values())
    for name, (verdict, chosen) in expected.items():
        assert found[name][0] == verdict and found[name][1] in chosen
        assert found[name][2] == pytest.approx(jaccard(texts[found[name][1]], texts[name]), abs=1e-4)


def test_the_default_finds_99_percent_of_pairs_from_0_8_on_and_no_others(tmp_path: Path) -> None:
    """Pairs linked by nothing else; 20 bands of 7 miss 0.9% of them at 0.8 and fewer above."""
    draw = random.Random(0)
    documents, truth = [], {}
    for seed in range(600):
        base = [f"{seed}-{place}" for place in range(draw.randrange(100, 300))]
        other = edited(base, round(len(base) * draw.uniform(0, 0.05)), draw)
        pair = [document(f"{seed}-{i}", " ".join(text)) for i, text in enumerate((base, [*other, "end"]))]
        truth[seed] = jaccard(pair[0]["text"], pair[1]["text"])
        documents += pair
    found, _ = search(documents, Dedup(), tmp_path / "work")
    groups = np.array([found[row["identity"]].keeper for row in documents]).reshape(-1, 2)
    linked = groups[:, 0] == groups[:, 1]
    alike = np.array([truth[seed] for seed in range(600)]) >= 0.8
    assert 200 < alike.sum() < 400
    assert linked[alike].mean() >= 0.99
    assert not linked[~alike].any()
    assert len(np.unique(groups)) == 1200 - linked.sum()


@pytest.mark.parametrize("verify", [False, True])
def test_order_and_split_change_nothing(verify: bool, tmp_path: Path) -> None:
    documents = families(9) + [document(f"copy-{i}", prose(5)) for i in range(3)]
    settings = Dedup(verify=verify)
    expected = search(documents, settings, tmp_path / "work")
    assert {verdict.kind for verdict in expected[0].values()} == {KEPT, EXACT, NEAR}
    for seed, size in enumerate((5, 12, 1000)):
        random.Random(seed).shuffle(documents)
        assert search(documents, settings, tmp_path / "work", size=size) == expected


@pytest.mark.parametrize(("verify", "least"), [(False, 0.6), (True, 0.5)])
def test_many_ranges_change_nothing(
    verify: bool, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large bucket of similar and different texts; keys, hashes and edges in many ranges and groups, tasks in any order."""
    base = prose(1, 100).split()
    draw = random.Random(0)
    documents = [document(i, " ".join(edited(base, draw.randrange(25), draw))) for i in range(150)] + families(1)
    documents += [document(f"copy-{i}", documents[i]["text"].upper()) for i in range(0, 150, 7)]
    settings = Dedup(bands=10, rows=2, min_jaccard=least, verify=verify)
    expected = search(documents, settings, tmp_path / "work")
    assert 1 < sum(verdict.kind == KEPT for verdict in expected[0].values()) < len(documents) - 40
    steps: set[str] = set()

    def shuffled(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        steps.update(one.folder.parent.name for one in tasks)
        for one in draw.sample(tasks, len(tasks)):
            one.run()
        return perform_here(tasks)

    for module, name in ((keys, "HASH_BYTES"), (keys, "KEY_BYTES"), (search_steps, "GROUP_BYTES")):
        monkeypatch.setattr(module, name, 1 << 20)
    for name, value in (("CHUNK", 3), ("MAX_PAIRS", 50)):
        monkeypatch.setattr(compare, name, value)
    monkeypatch.setattr(keys, "CHUNK", 11)
    settings = settings.model_copy(update={"memory_mib": 40})
    assert search(documents, settings, tmp_path / "work", size=15, perform=shuffled) == expected
    assert {"FindComponents", "GroupEdges"} < steps
    assert {path.name for path in (tmp_path / "work" / "duplicates").iterdir()} == {"result", "verdicts"}


def test_a_member_that_differs_from_the_first_of_its_bucket_is_still_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bucket per band, whose first member differs from all others."""

    def equal_keys(values: np.ndarray, rows: int, salts: np.ndarray, keys: np.ndarray) -> None:
        keys[:] = np.arange(len(keys))[:, None]

    monkeypatch.setattr("bessemer.corpus.dedup.signatures.band_keys", equal_keys)
    monkeypatch.setattr(keys, "REACH", 4)
    draw, other = random.Random(0), prose(2).split()
    documents = [document("a", prose(1, 2 * len(other)))]
    documents += [document(i, " ".join(edited(other, 1, draw))) for i in range(5)]
    found, _ = search(documents, Dedup(min_jaccard=0.7), tmp_path / "work", size=4)
    groups = all_pairs_components([row["text"] for row in documents], 0.7)
    kept = [found[row["identity"]].keeper for row in documents]
    assert len(set(groups)) == 2
    assert [kept.index(name) for name in kept] == groups


def one_group(keep: str, tmp_path: Path, exact: bool = False) -> tuple[Document, list[Document]]:
    """Return which of three similar documents is kept."""
    base = prose(1).split()
    draw = random.Random(0)
    texts = [" ".join(base)] * 3 if exact else [" ".join(edited(base, 1, draw)) for _ in range(3)]
    documents = [
        document("a", texts[0] + " and more", "web", quality=0.2),
        document("b", texts[1], "books", quality=0.9),
        document("c", texts[2], "wiki", quality=None),
    ]
    if exact:
        documents[0]["text"] = texts[0].upper()
    found, _ = search(documents, Dedup(keep=keep), tmp_path / "work", ["wiki", "books", "web"], size=2)
    (kept,) = [name for name, verdict in found.items() if verdict.kind == KEPT]
    return next(row for row in documents if row["identity"] == kept), documents


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("keep", "source"), [("quality", "books"), ("first-source", "wiki")])
def test_the_rule_chooses_the_kept_copy(keep: str, source: str, exact: bool, tmp_path: Path) -> None:
    assert one_group(keep, tmp_path, exact)[0]["source"] == source


def test_the_longest_is_kept_and_among_equals_the_smallest_identity(tmp_path: Path) -> None:
    assert one_group("longest", tmp_path)[0]["source"] == "web"
    kept, documents = one_group("longest", tmp_path, exact=True)
    assert kept["identity"] == min(row["identity"] for row in documents)


def test_quality_needs_scores(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="corpus.dedup.keep"):
        search([document(1, prose(1))], Dedup(keep="quality"), tmp_path / "work")


def test_within_a_source_or_a_crawl_only(tmp_path: Path) -> None:
    base = prose(1).split()
    near = " ".join(edited(base, 1, random.Random(0)))
    documents = [document(source + kind, text, source) for source in "xy" for kind, text in
                 (("a", " ".join(base)), ("b", " ".join(base)), ("c", near))]  # fmt: skip
    crawls = ("a/CC-MAIN-2024-10/1.warc", "b/CC-MAIN-2024-18/2.warc", "b/CC-MAIN-2024-10/3.warc")
    for row, path in zip(documents, crawls * 2, strict=True):
        row["path"] = path
    kept = {}
    for within in ("corpus", "source", "crawl"):
        found, _ = search(documents, Dedup.model_validate({"within": within}), tmp_path / "work", size=4)
        kept[within] = [row for row in documents if found[row["identity"]].kind == KEPT]
    assert len(kept["corpus"]) == 1
    assert sorted(row["source"] for row in kept["source"]) == ["x", "y"]
    assert sorted(row["path"][2:17] for row in kept["crawl"]) == ["CC-MAIN-2024-10", "CC-MAIN-2024-18"]


def test_a_repeated_identity_is_named(tmp_path: Path) -> None:
    row = document(1, prose(1))
    with pytest.raises(InputError, match=row["identity"]):
        search([row, document(2, prose(2)), row], Dedup(), tmp_path / "work")


def test_no_documents_and_texts_without_a_shingle(tmp_path: Path) -> None:
    assert search([], Dedup(), tmp_path / "work")[1]["documents"] == 0
    documents = [document(i, text) for i, text in enumerate(["", "a b c d", "a b c e", "x"])]
    found, _ = search(documents, Dedup(), tmp_path / "work", size=2)
    assert [verdict.kind for verdict in found.values()] == [KEPT] * 4


@pytest.mark.parametrize("layout", ["corpus/documents", "documents", "."])
def test_documents_of_an_earlier_corpus_are_kept(layout: str, tmp_path: Path) -> None:
    """Duplicates of an earlier corpus are removed, exact or near, even if longer; a new identity may equal an old one."""
    base, draw = prose(1).split(), random.Random(0)
    old = [document("same", prose(7)), document("old", " ".join(base)), document("alone", prose(8))]
    old += [document("twin", prose(8)), document("other form", unicodedata.normalize("NFD", prose(10) + " vorüber"))]
    folder = tmp_path / "old" / layout
    folder.mkdir(parents=True)
    columns = ("identity", "text", "source", "path")
    pq.write_table(pa.table({name: [row[name] for row in old] for name in columns}), folder / "part-00000.parquet")
    new = [
        old[0],
        document("longer", " ".join(edited(base, 1, draw)) + " and some more words"),
        document("new", prose(9)),
        document("copy", " ".join(base).upper()),
        document("form", prose(10) + " vorüber"),
    ]
    settings = Dedup(against=(str(tmp_path / "old"),))
    found, counts = search(new, settings, tmp_path / "work", size=3)
    assert {row["path"]: found[row["identity"]].kind for row in new} == {
        "fsame": EXACT, "flonger": NEAR, "fnew": KEPT, "fcopy": EXACT, "fform": EXACT,
    }  # fmt: skip
    where, names = str(tmp_path / "old"), {row["path"]: row["identity"] for row in old}
    kept = {row["path"]: (found[row["identity"]].keeper, found[row["identity"]].corpus) for row in new}
    assert kept == {
        "fsame": (names["fsame"], where), "flonger": (names["fold"], where), "fnew": (new[2]["identity"], None),
        "fcopy": (names["fold"], where), "fform": (names["fother form"], where),
    }  # fmt: skip
    assert (counts["documents"], counts["removed"]) == (5, {"exact": 3, "near": 1})


def test_a_missing_earlier_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no corpus"):
        search([document(1, prose(1))], Dedup(against=(str(tmp_path / "nothing"),)), tmp_path / "work")


def test_statistics_count_what_was_removed(tmp_path: Path) -> None:
    base, draw = prose(1).split(), random.Random(0)
    documents = [document("a", " ".join(base) + " longest"), document("b", " ".join(base))]
    documents += [
        document("c", " ".join(edited(base, 1, draw))), document("d", prose(2)), document("e", prose(2).upper()),
        document("f", prose(3)),
    ]  # fmt: skip
    _, found = search(documents, Dedup(verify=True), tmp_path / "work", size=3)
    assert found["removed"] == {"exact": 1, "near": 2}
    expected = [0] * 40
    for row in documents[1:3]:
        expected[int(jaccard(row["text"], documents[0]["text"]) * 40)] += 1
    assert [row["documents"] for row in found["jaccard"]] == expected
    assert (found["jaccard_is"], found["min_jaccard"]) == ("verified", 0.8)
    assert found["jaccard"][39] == {"from": 0.975, "documents": expected[39]}
    assert found["clusters"] == [{"documents": 2, "clusters": 1}, {"documents": 3, "clusters": 1}]


def test_a_finished_search_repeats_only_damaged_verdicts(tmp_path: Path) -> None:
    documents, folder = families(1), tmp_path / "work"
    pq.write_table(pa.Table.from_pylist(documents), tmp_path / "documents.parquet")
    part, done = ParquetPart(tmp_path / "documents.parquet"), []

    def counted(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        done.extend(tasks)
        return perform_here(tasks)

    def found(made_of: str) -> dict[str, Any]:
        return run_step(search_steps.DuplicateStep(), CorpusDocuments([part], folder, made_of, perform=counted))

    expected = found("made of")
    verdicts = folder / "verdicts" / "000000" / "000000.arrow"
    content = verdicts.read_bytes()
    num_tasks = len(done)
    assert found("made of") == expected
    assert len(done) == num_tasks
    verdicts.write_bytes(content[:-1])
    assert found("made of") == expected
    assert verdicts.read_bytes() == content
    found("other documents")
    assert len(done) == 3 * num_tasks
