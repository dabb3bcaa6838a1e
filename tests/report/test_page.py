import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.report import figures, page
from bessemer.run import RunFolder, write_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&{{ 7 * 7 }}"


def fill(folder: Path, steps: int = 50) -> RunFolder:
    """A run folder with everything in it, made by hand."""
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.recipe.write_text(
        '[run]\nname = "hand"\n\n[[corpus.sources]]\nname = "web"\n\n[train.optimizer]\nclip_norm = 1.0\n'
    )
    write_json(run.environment, {"device": "a device", "python": "3.11", "git": {"commit": "a" * 40, "dirty": True}})
    run.corpus.mkdir()
    example = {"path": HOSTILE, "excerpt": HOSTILE, "detail": HOSTILE}
    source = {
        "source": "web", "format": "html", "files": 3, "documents_in": 10, "bytes_in": 9000, "documents_kept": 7,
        "bytes_kept": 5000, "rejected": {"too_short": {"documents": 3, "bytes": 30, "examples": [example]}},
    }  # fmt: skip
    write_json(
        run.corpus / "statistics.json", {"sources": [source], "totals": {"documents_in": 10, "documents_kept": 7}}
    )
    run.tokens.mkdir()
    counts = {"documents": 6, "tokens": 900, "bytes": 2700}
    write_json(run.tokens / "manifest.json", {"sources": {"web": {"train": counts, "heldout": counts}}})
    write_json(run.plan, {"parameters": {"total": 1e6, "non_embedding": 8e5}, "seconds": 10.0, "step_seconds": 0.2, "tokens_per_second": 5e3,
                          "memory_bytes": {"total": 1e9}})  # fmt: skip
    lines = []
    for step in range(1, steps + 1):
        row = {"kind": "train", "step": step, "tokens": step * 1000, "loss": 8 / math.sqrt(step), "grad_norm": 1.0, "loss_by_source": {"web": 3.0},
               "learning_rate": 1e-3, "tokens_per_second": 4e3, "mfu": 0.4, "data_wait": 0.001, "step_seconds": 0.25, "memory_bytes": 8e8}  # fmt: skip
        lines.append(json.dumps(row))
    lines.append(
        json.dumps({"kind": "validation", "step": steps, "tokens": steps * 1000, "loss": 2.0, "bits_per_byte": 1.5})
    )
    run.metrics.write_text("\n".join(lines) + "\n")
    write_json(folder / "mixture.json", {"sources": {"web": {"target_share": 1.0, "drawn_share": 1.0, "tokens": 10, "epochs": 5.0,
                                                             "repeated_often": True}}, "largest_deviation": 0.0})  # fmt: skip
    run.incidents.write_text(json.dumps({"step": 4, "what": "nonfinite_step", "cause": HOSTILE, "action": "update skipped",
                                         "documents": [{"documents": ["d1"]}]}) + "\n")  # fmt: skip
    write_json(run.evaluation, {"bits_per_byte": 1.5, "ngram": {"order": 5, "bits_per_byte": 2.0},
                                "samples": [{"prompt": "def ", "text": HOSTILE, "temperature": 0.8}]})  # fmt: skip
    run.export.mkdir()
    write_json(
        run.export / "bessemer.json",
        {"architecture": "Qwen3ForCausalLM", "logits_max_difference": 1e-6, "tolerance": 1e-4, "files": {}},
    )
    write_json(folder / "stages.json", {"stages": [{"name": "train", "seconds": 12.0, "skipped": False}]})
    return run


SECTIONS = ("curves", "plan", "samples", "corpus", "tokens", "incidents", "export", "run")


def sections_of(text: str) -> set[str]:
    return set(re.findall(r'<section id="(\w+)"', text))


def test_everything_that_is_there_is_shown(tmp_path: Path) -> None:
    text = page.write(fill(tmp_path / "run")).read_text()
    assert sections_of(text) == set(SECTIONS)
    for said in (
        "0.500 fewer than a byte 5-gram",
        "too short",
        "nonfinite step",
        "repeated more than 4 times",
        "Qwen3ForCausalLM",
        "1.25",
    ):
        assert said in text, said


def test_what_is_not_there_is_not_shown(tmp_path: Path) -> None:
    run = fill(tmp_path / "run")
    for path in (
        run.metrics,
        run.evaluation,
        run.plan,
        run.tokens / "manifest.json",
        run.export / "bessemer.json",
        tmp_path / "run" / "mixture.json",
    ):
        path.unlink()
    assert sections_of(page.write(run).read_text()) == {"corpus", "run"}


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    text = page.write(fill(tmp_path / "run")).read_text()
    own = text.replace(_plotly(), "")
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', own)
    assert "@import" not in own
    assert "url(" not in own


def test_text_of_documents_cannot_run(tmp_path: Path) -> None:
    own = page.write(fill(tmp_path / "run")).read_text().replace(_plotly(), "")
    assert "<script>alert" not in own
    assert "<img" not in own
    assert "{{ 7 * 7 }}" in own  # shown as it is, not evaluated
    embedded = page.script_json([{"name": HOSTILE}])
    assert "<" not in embedded
    assert json.loads(embedded) == [{"name": HOSTILE}]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_long_curves_keep_their_ends_and_extremes() -> None:
    x = np.arange(1_000_000, dtype=np.float64)
    y = np.sin(x / 1e4)
    y[777_777], y[123_456] = 99.0, -99.0
    kept_x, kept_y = figures.thin(x, y)
    assert len(kept_x) <= figures.POINTS
    assert (kept_x[0], kept_x[-1]) == (0.0, 999_999.0)
    assert (kept_y.max(), kept_y.min()) == (99.0, -99.0)
    assert np.all(np.diff(kept_x) > 0)


def test_smoothing_is_a_corrected_average() -> None:
    assert np.allclose(figures.smooth(np.full(20, 3.0), 5.0), 3.0)
    y = np.array([1.0, 3.0])
    keep = 0.5 ** (1 / 2)
    assert figures.smooth(y, 2.0)[1] == pytest.approx(
        (keep * (1 - keep) * 1 + (1 - keep) * 3) / (keep * (1 - keep) + 1 - keep)
    )


def test_damage_is_a_note_and_not_an_error(tmp_path: Path) -> None:
    run = fill(tmp_path / "run")
    with open(run.metrics, "a") as file:
        file.write("{broken\n[1]\n")
    run.plan.write_text("{")
    run.recipe.write_text("[run\n")
    text = page.write(run).read_text()
    assert "2 damaged lines of metrics.jsonl left out." in text
    assert "plan.json is damaged and was left out." in text


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="nothing of a run lies here"):
        page.write(RunFolder(tmp_path / "run"))
    with pytest.raises(InputError, match="no such run folder"):
        page.write(RunFolder(tmp_path / "none"))
