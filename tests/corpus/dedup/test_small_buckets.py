"""Small buckets are deduplicated together: the same corpus, byte for byte, with fewer tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpus_samples import prose, recipe

from bessemer.corpus import global_steps, partition, pipeline
from bessemer.corpus.global_steps import CorpusDocuments, GlobalStep
from bessemer.recipe import Quality
from bessemer.run.directory import RunDirectory


@pytest.mark.parametrize("steps", ["plain", pytest.param("quality, lines", marks=pytest.mark.long)])
def test_grouping_buckets_does_not_change_the_corpus(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    monkeypatch.setattr(partition, "BUCKET_BYTES", 6_000)
    names = ("one", "two", "three")
    for place, name in enumerate(names):
        (data / name).mkdir(exist_ok=True)
        for number in range(40):
            text = prose(1000 * place + number) + f"\n\nA line of {name} that all of its texts end with."
            (data / name / f"{number}.txt").write_text(text)
            if number % 4 == 0:  # copies and near copies, most in another bucket and some in another source
                other = data / names[(place + number) % 3]
                other.mkdir(exist_ok=True)
                (other / f"copy-{name}-{number}.txt").write_text(text.upper())
                (other / f"near-{name}-{number}.txt").write_text(text + "\nand some more words")
            if number % 10 == 0:
                (data / name / f"short-{number}.txt").write_text("short")
    sources = [{"name": name, "format": "text", "paths": [str(data / name)]} for name in names]
    of = recipe(*sources, dedup="bands = 14\nrows = 8")
    if steps != "plain":
        of = recipe(*sources, dedup="bands = 14\nrows = 8\nlines = true")
        quality = Quality(high=("one",), low=("two",), hash_bits=12, use="filter", keep_share=0.8)
        of = of.changed(corpus={"quality": quality})
    parts: list[int] = []
    run_step = global_steps.run_step

    def counted(step: GlobalStep, documents: CorpusDocuments) -> dict[str, Any]:
        if step.name == "duplicates":
            parts.append(len(documents.parts))
        return run_step(step, documents)

    monkeypatch.setattr(global_steps, "run_step", counted)
    found = []
    for number, group_bytes in enumerate((0, 20_000, 1 << 30)):
        monkeypatch.setattr(global_steps, "GROUP_BYTES", group_bytes)
        run = RunDirectory(tmp_path / str(number))
        totals: dict[str, Any] = pipeline.build(of, run)
        assert totals["rejected"]["exact_duplicate"] >= 5 and totals["rejected"]["near_duplicate"] >= 5
        files = (
            path for path in run.corpus.rglob("*") if path.is_file() and path.name not in ("quality.json", "stage.json")
        )
        found.append({str(path.relative_to(run.corpus)): path.read_bytes() for path in files})
    assert parts[0] > parts[1] > parts[2] == 1
    assert found[0] == found[1] == found[2]
