"""A run directory as the stages write it, with every file that the report reads."""

import base64
import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.report.live_server import Server
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json

PARAMETERS, BATCH, CONTEXT = 1_377_664, 4096, 256
MakeRun = Callable[..., RunDirectory]

RECIPE = """\
export = {}
[run]
name = "forge"
dir = "runs"
seed = 7
[[corpus.sources]]
name = "code"
format = "code"
paths = [
    "python://site-packages",
]
weight = 0.6
[[corpus.sources]]
name = "docs"
format = "text"
paths = ["docs"]
weight = 0.3
[[corpus.sources]]
name = "notes"
format = "jsonl"
paths = ["notes.jsonl"]
weight = 0.1
[model]
depth = 4
[train]
steps = 1200
[train.optimizer]
learning_rate = 0.01
clip_norm = 1.0
"""


def write_run(folder: Path, steps: int = 1200, hostile: str = "", seed: int = 0) -> RunDirectory:
    """Write a complete run. `hostile` is inserted wherever text comes from documents."""
    run = RunDirectory(folder)
    for inner in (run.corpus, run.tokens, run.export):
        inner.mkdir(parents=True)
    run.recipe.write_text(RECIPE, encoding="utf-8")
    write_json(run.corpus / "statistics.json", statistics(hostile))
    write_json(run.tokens / "manifest.json", manifest())
    write_json(run.plan, plan())
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics(steps, seed)), encoding="utf-8")
    write_json(run.path / "mixture.json", mixture(steps))
    run.incidents.write_text(json.dumps(incident(hostile)) + "\n", encoding="utf-8")
    write_json(run.evaluation, evaluation(steps, hostile))
    write_json(run.export / "bessemer.json", EXPORT)
    write_json(run.path / "stages.json", {"stages": STAGES})
    write_json(run.environment, ENVIRONMENT)
    return run


def metrics(steps: int, seed: int) -> list[dict[str, Any]]:
    """Return metrics: a noisy loss that falls by a power law, with one spike, and some steps that waited for data."""
    noise = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        smooth = 4.27 * (1 + step / 40) ** -0.72
        spike = 1.4 * math.exp(-(step - 700) / 6) if step >= 700 else 0.0
        loss = 3.35 + smooth + noise.normal(0, 0.09) + spike
        seconds = 0.205 + abs(noise.normal(0, 0.006)) + (0.09 if noise.random() < 0.01 else 0.0)
        both = {"step": step, "tokens": step * BATCH, "time": "2026-03-01T10:00:00.000+00:00"}
        by_source = {name: loss + offset for name, offset in {"code": -0.3, "docs": 0.35, "notes": 0.75}.items()}
        rows.append({
            "kind": "train", **both, "loss": loss, "loss_by_source": by_source,
            "grad_norm": 0.32 + 2.2 * math.exp(-step / 15) + abs(noise.normal(0, 0.05)) + 2.5 * spike,
            "learning_rate": 0.01 * min(step / 24, 1.0), "step_seconds": seconds, "tokens_per_second": BATCH / seconds,
            "mfu": 0.105 / seconds, "data_wait": abs(noise.normal(0.0006, 0.0003)),
            "memory_bytes": 812e6 + 4e6 * min(step, 30) / 30,
        })  # fmt: skip
        if step % max(steps // 12, 1) == 0:
            bits = 0.508 * (3.44 + smooth)
            by_source = {"code": bits - 0.08, "docs": bits + 0.14, "notes": bits + 0.31}
            rows.append({"kind": "validation", **both, "loss": bits / 0.508, "bits_per_byte": bits,
                         "bits_per_byte_by_source": by_source})  # fmt: skip
    return rows


REJECTED = {
    "code": {
        "too_short": (815, 61_911, "python://mypy/__main__.py", "from mypy import main\n\nmain()", "84 characters"),
        "exact_duplicate": (713, 2_204_656, "python://plotly/bar/_title.py", "import sys", "kept instead: 056f7eed"),
        "near_duplicate": (402, 6_981_022, "python://torch/_inductor/kernel.py", "import triton", "Jaccard 0.91"),
    },
    "docs": {"not_utf8": (143, 91_300, "docs/latin1/readme.txt", "caf\ufffd cr\ufffdme", "byte 0xe9 at 412")},
    "notes": {"repetitive": (152, 880_400, "notes.jsonl:1204", "----\n----\n----\n", "distinct lines 4%")},
}  # documents, bytes and an example of each reason


def statistics(hostile: str) -> dict[str, Any]:
    """Return the funnel of three sources."""
    sources = []
    for name, form, came, size in (
        ("code", "code", 9541, 152e6),
        ("docs", "text", 1312, 21e6),
        ("notes", "jsonl", 4021, 9e6),
    ):
        rejected: dict[str, Any] = {}
        for reason, (documents, num_bytes, *words) in REJECTED[name].items():
            example = {key: word + hostile for key, word in zip(("path", "excerpt", "detail"), words, strict=True)}
            rejected[reason] = {"documents": documents, "bytes": num_bytes, "examples": [example]}
        kept = came - sum(entry["documents"] for entry in rejected.values())
        sources.append({
            "source": name, "format": form, "files": 3, "documents_in": came, "bytes_in": size, "documents_kept": kept,
            "bytes_kept": 0.8 * size, "rejected": rejected,
            "length_histogram": [{"from_characters": 256 << power, "documents": kept >> power} for power in range(1, 6)],
        })  # fmt: skip
    keys = ("files", "documents_in", "bytes_in", "documents_kept", "bytes_kept")
    counts = {reason: entry["documents"] for row in sources for reason, entry in row["rejected"].items()}
    totals = {key: sum(row[key] for row in sources) for key in keys}
    return {"version": 1, "sources": sources, "totals": {**totals, "rejected": counts}}


def manifest() -> dict[str, Any]:
    """Return the manifest of shards of three sources."""

    def split(documents: int, tokens: int) -> dict[str, Any]:
        return {"documents": documents, "tokens": tokens, "bytes": 3 * tokens, "files": []}

    return {
        "format": 1,
        "tokenizer": {"vocabulary": 2048, "end_of_text": 0, "sha256": "9f" * 32, "bytes_per_token": 2.84, "trained": True},
        "sources": {
            "code": {"train": split(7498, 41_204_118), "heldout": split(76, 436_112)},
            "docs": {"train": split(1157, 6_371_004), "heldout": split(12, 65_040)},
            "notes": {"train": split(3829, 117_204), "heldout": split(40, 25_810)},
        },
    }  # fmt: skip


def plan() -> dict[str, Any]:
    """Return the run's plan."""
    memory = {"weights": 5_510_656, "optimizer": 11_021_312, "activations": 112_197_632, "before_model": 604_209_152}
    return {
        "device": "AMD EPYC, 2 threads", "parameters": PARAMETERS, "steps": 1200, "tokens": BATCH * 1200,
        "parameters_by_part": {"embedding": 524_288, "non_embedding": PARAMETERS - 524_288},
        "memory_bytes": {**memory, "total": sum(memory.values())}, "step_seconds": 0.198,
        "step_seconds_from": "measured on this machine", "seconds": 0.198 * 1200, "tokens_per_second": BATCH / 0.198,
    }  # fmt: skip


def mixture(steps: int) -> dict[str, Any]:
    """Return the audit of the mixture; the smallest source was read more than four times."""
    sequences = steps * BATCH // CONTEXT
    rows = {}
    for name, share, available in (("code", 0.6, 41_204_118), ("docs", 0.3, 6_371_004), ("notes", 0.1, 117_204)):
        tokens = int(sequences * share) * CONTEXT
        rows[name] = {"target_share": share, "drawn_share": share + 0.001, "sequences": int(sequences * share),
                      "tokens": tokens, "epochs": tokens / available}  # fmt: skip
    return {"samples": sequences, "block": 8192, "sources": rows, "largest_deviation": 0.001}


def incident(hostile: str) -> dict[str, Any]:
    """Return the incident of a skipped step."""
    documents = [{"sample": number, "documents": [f"code/{number:032x}{hostile}"]} for number in range(12)]
    return {
        "time": "2026-03-01T10:02:24+00:00", "step": 700, "rank": 0, "what": "nonfinite_step",
        "cause": "the gradient norm is inf" + hostile, "action": "update skipped", "documents": documents,
    }  # fmt: skip


def evaluation(steps: int, hostile: str) -> dict[str, Any]:
    """Return the final scores and two samples."""
    return {
        "step": steps, "loss": 3.802, "bits_per_byte": 1.931, "tokens": 526_962,
        "bits_per_byte_by_source": {"code": 1.85, "docs": 2.07, "notes": 2.24},
        "ngram": {"order": 5, "bits_per_byte": 2.042}, "ppmd": {"order": 10, "bits_per_byte": 1.402},
        "samples": [
            {"prompt": "def read(", "text": "self, path):\n    return open(path).read()\n" + hostile, "temperature": 0.8},
            {"prompt": "import ", "text": "numpy as np\n", "temperature": 0},
        ],
    }  # fmt: skip


EXPORT = {
    "architecture": "Qwen3ForCausalLM", "parameters": PARAMETERS, "logits_max_difference": 4.29e-06, "tolerance": 1e-4,
    "greedy_tokens_equal": 32, "tokenizer_documents_equal": 12, "transformers": "5.23.0",
    "files": {"config.json": 535, "model.safetensors": 5_515_624, "tokenizer.json": 121_531},
}  # fmt: skip
STAGES = [
    {"name": name, "seconds": seconds, "skipped": name == "corpus"}
    for name, seconds in (("corpus", 44.8), ("tokens", 21.4), ("train", 279.1), ("export", 3.1))
]
ENVIRONMENT = {
    "bessemer": "0.1.0", "started": "2026-03-01T09:58:12+00:00", "device": "AMD EPYC, 2 threads", "precision": "fp32",
    "memory_bytes": 25_276_502_016, "git": {"commit": "4f2a9c1d7be0" + "0" * 28, "dirty": True},
    "packages": {"numpy": "2.4.6", "plotly": "7.1.0", "wandb": None},
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a complete run into a new folder."""
    return lambda **options: write_run(**{"folder": tmp_path / "forge", **options})


class Reader(HTMLParser):
    """HTML parser that collects elements with attributes, the text of scripts, and other text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text.append(data)

    def sections(self) -> list[str | None]:
        return [attributes.get("id") for tag, attributes in self.elements if tag == "section"]

    def figures(self) -> dict[str, Any]:
        """Return the data of the figures."""
        found: dict[str, Any] = json.loads(next(text for text in self.scripts if text.startswith("{")))
        return found

    def is_whole(self, sections: list[str]) -> None:
        """Check the sections, their links in order, and an element for each figure; no network access, and a policy that allows
        only the scripts of the page.
        """
        assert self.sections() == sections
        links = [attributes["href"] for tag, attributes in self.elements if tag == "a"]
        assert links == ["#top", *(f"#{name}" for name in sections)]
        assert sorted(
            attributes["data-figure"] or "" for _, attributes in self.elements if "data-figure" in attributes
        ) == (sorted(self.figures()))
        for tag, attributes in self.elements:
            assert "src" not in attributes, tag
            assert tag not in ("link", "iframe", "object", "embed", "base", "image", "use")
            assert not any(name.startswith("on") for name in attributes), attributes
            assert (attributes.get("href") or "#").startswith("#")
        policy = next(str(attributes["content"]) for _, attributes in self.elements if "http-equiv" in attributes)
        assert policy.startswith("default-src 'none'")
        code = [text for text in self.scripts if not text.startswith("{")]
        assert len(code) == 2
        for text in code:
            assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


def section_of(html: str, name: str) -> str:
    """Return the HTML of a section of a page, or ""."""
    found = re.search(rf'<section id="{name}">.*?</section>', html, re.DOTALL)
    return found[0] if found else ""


def plain(html: str) -> str:
    """Return the text of HTML with white space as a browser shows it."""
    return " ".join(unescape(re.sub(r"<[^>]*>", "", html)).split())


def tables(html: str) -> dict[str, list[list[str]]]:
    """Return the rows of each table without column headings, by the heading or summary before it."""
    found: dict[str, list[list[str]]] = {}
    for before, body in re.findall(r"(.*?)<tbody>(.*?)</tbody>", html, re.DOTALL):
        titles = re.findall(r"<h3>(.*?)</h3>|<summary>(.*?)</summary>", before)
        title = plain("".join(titles[-1])) if titles else next(reversed(found), "")
        rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
        cells = [[plain(cell) for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", row, re.DOTALL)] for row in rows]
        found[title] = found.get(title, []) + cells
    return found


def valid_plotly(figure: dict[str, Any]) -> None:
    """Check that Plotly accepts every name in a figure."""
    plotly = pytest.importorskip("plotly.graph_objects")
    traces = [{**trace, **trace.get("levels", [{}])[-1]} for trace in figure["traces"]]
    traces = [{key: value for key, value in trace.items() if key not in ("ink", "inks", "levels")} for trace in traces]
    plotly.Figure({"data": traces, "layout": figure["layout"]})


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Return a function that starts servers of the live page."""
    with contextlib.ExitStack() as servers:

        def start(*runs: RunDirectory) -> Server:
            server = servers.enter_context(Server(runs, 0))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            servers.callback(server.shutdown)
            return server

        yield start
