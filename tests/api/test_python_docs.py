"""The Python code of docs/how-to/python.md and of the README runs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WORDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to/python.md"
SMALLER = {
    "vocabulary=8_000": "vocabulary=400, sequence_length=32, held_out=0.1",
    '"depth": 4': '"depth": 1',
    '"train.minutes": 5': '"train.steps": 4',
}


@pytest.mark.usefixtures("fixed_step_time")
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    texts = (" ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 60)) for number in range(1, 90))
    lines = [json.dumps({"body": f"{text} {number}."}) for number, text in enumerate(texts)]
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["run"].steps[-1] == 12 and names["page"].exists() and names["batch"].inputs.shape == (8, 32)
    assert len(names["first"]) == len(names["short"]) == 3 and names["sample"]["documents"] == 89
    assert names["plan"].fits and len(list(names["stream"])) == len(list(names["tokens"]))


@pytest.mark.usefixtures("fixed_step_time")
def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    draw = random.Random(0)
    texts = (
        " ".join(f"the {draw.choice(WORDS)} of another {draw.choice(WORDS)}" for _ in range(60)) for _ in range(99)
    )
    lines = [json.dumps({"body": f"{text}."}) for text in texts]
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for text, smaller in SMALLER.items():
        assert text in code
        code = code.replace(text, smaller)
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(compile(code, "README.md", "exec"), names)
    assert names["run"].steps[-1] == 4
