"""Shared fixtures: a small text of two kinds, a small recipe, and runs made from it."""

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.object_store import Store, store
from tests.quick import measure_little
from tests.warm import Warm

pytest_plugins = ["tests.faults"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it
# Workers share the cores, and some results depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:  # a fork
    sys.modules["torch"].set_num_threads(1)

RECIPE = """
[run]
name = "small"
dir = "{dir}"
seed = 3

[[corpus.sources]]
name = "prose"
format = "text"
paths = ["{text}/prose"]

[[corpus.sources]]
name = "code"
format = "code"
paths = ["{text}/code"]

[corpus.rules]
min_characters = 20

[tokenizer]
vocabulary = 400

[tokens]
sequence_length = 32
held_out = 0.1

[model]
layers = 2
width = 32
heads = 2
kv_heads = 1
mlp_width = 64

[train]
steps = 24
global_batch_tokens = 256
micro_batch = 4
log_every = 1
device = "cpu"

[train.optimizer]
learning_rate = 0.01

[checkpoint]
every = 8

[evaluate]
sample_tokens = 8
prompts = ["def "]
"""

WORDS = tuple(
    """
    the of and a to in is was he for it with as his on be at by had not are but from or have an they which one you
    were all her she there would their we him been has when who will no more if out so up said what its about than
    into them can only other time new some could these two may first then do any like my now over such our man even
    """.split()  # noqa: SIM905 (a list of 90 strings reads worse)
)


def write_conversations(path: Path, count: int = 120) -> Path:
    """Write questions with answers as a source of `format = "chat"`."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "Answer."}] if number % 3 == 0 else []
        for _ in range(1 + number % 2):
            words = draw.choices(WORDS, k=3)
            messages.append({"role": "user", "content": f"Say {' '.join(words)} the other way round."})
            messages.append({"role": "assistant", "content": f"{' '.join(words[::-1])}."})
        rows.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(rows))
    return path


def write_text(folder: Path, documents: int = 60) -> Path:
    """Write two sources of generated text, for a tokenizer of 400 ids and a tiny model."""
    draw = random.Random(0)
    for kind in ("prose", "code"):
        (folder / kind).mkdir(parents=True)
    for number in range(documents):
        sentences = [" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(12)]
        (folder / "prose" / f"{number:03d}.txt").write_text("\n".join(sentences) + "\n")
        names = draw.sample(WORDS, 6)
        lines = [
            f"def {a}_{b}({a}, {b}):\n    return {a} + {draw.randint(0, 999)} * {b}\n"
            for a, b in itertools.pairwise(names)
        ]
        (folder / "code" / f"{number:03d}.py").write_text("\n".join(lines))
    return folder


def recipe_text(folder: Path) -> str:
    """Return the small recipe over `folder`/text, with its runs in `folder`/runs."""
    return RECIPE.format(dir=folder / "runs", text=folder / "text")


def with_model(text: str, model: str) -> str:
    """Return that recipe with other lines for its model."""
    begin, end = text.index("[model]\n"), text.index("[train]\n")
    return f"{text[:begin]}[model]\n{model}\n\n{text[end:]}"


# Has what it takes to fork (tests/warm.py).
IS_WARM = sys.platform.startswith("linux") and not os.environ.get("COLD_PYTHON")
_SERVER = pytest.StashKey[Warm]()


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of pytest-xdist from the process from which their programs are forked."""
    workers = getattr(config.option, "tx", None)
    if IS_WARM and workers and not hasattr(config, "workerinput"):
        server = config.stash[_SERVER] = Warm()
        os.environ["WARM_PYTHON"] = str(server.interpreter)
        config.option.tx = [f"popen//python={server.interpreter}"] * len(workers)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (server := config.stash.get(_SERVER, None)) is not None:
        server.close()


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Start the programs of tests as forks of a process that has loaded everything."""
    if not IS_WARM:
        yield
        return
    is_shared = "PYTEST_XDIST_WORKER" in os.environ and "WARM_PYTHON" in os.environ
    warm = None if is_shared else Warm()
    if warm is not None:
        os.environ["WARM_PYTHON"] = str(warm.interpreter)
    real, sys.executable = sys.executable, os.environ["WARM_PYTHON"]
    wait = subprocess.Popen.wait

    def wait_for_fork(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Wait for the fork itself, which the server kills shortly after its proxy was killed."""
        code = wait(process, timeout)
        if code == -signal.SIGKILL:
            time.sleep(0.3)
        return code

    subprocess.Popen.wait = wait_for_fork  # type: ignore[assignment, method-assign]
    yield
    is_fork = [sys.executable, "-c", "import sys; sys.exit('torch' not in sys.modules)"]
    assert subprocess.run(is_fork).returncode == 0, (
        "a variable that a test left set keeps programs from being forks: see tests/warm.py"
    )
    subprocess.Popen.wait = wait  # type: ignore[method-assign]
    sys.executable = real
    if warm is not None:
        warm.close()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new interpreter, for tests of what it loads and of its memory."""
    monkeypatch.setenv("COLD_PYTHON", "1")


@pytest.fixture
def fixed_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the measured step time at 0.01 seconds, without timing a step."""
    monkeypatch.setattr("bessemer.train.measure.step_seconds", lambda *arguments: 0.01)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A local object store with the bucket b and an object that must not change."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-someone")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("bessemer.storage.filesystem.ATTEMPTS", 2)  # fails at once
    with store(tmp_path / "store") as served:
        (served.folder / "b" / "others").mkdir(parents=True)
        (served.folder / "b" / "others" / "object").write_bytes(b"not mine")
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.endpoint)
        yield served


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a web server of this machine, and the JSON objects posted to it."""
    posts: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", posts
        server.shutdown()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, recipe.toml and a run with corpus and tokens. Read only; copy it to train."""
    from bessemer.cli import run_command

    folder = tmp_path_factory.mktemp("prepared")
    write_text(folder / "text")
    (folder / "small.toml").write_text(recipe_text(folder))
    assert run_command(["corpus", str(folder / "small.toml")]) == 0
    assert run_command(["tokens", str(folder / "small.toml")]) == 0
    return folder


@pytest.fixture
def runs(prepared: Path, tmp_path: Path) -> Path:
    """A writable copy of the runs of `prepared`."""
    import shutil

    shutil.copytree(prepared / "runs", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def recipe_file(prepared: Path) -> Iterator[Path]:
    """The small recipe's file. All tests share its `run.dir`: a test that writes runs sets another one."""
    yield prepared / "small.toml"
    assert os.listdir(prepared / "runs") == ["small"], "a run was made where the other tests' runs are copied from"


@pytest.fixture
def bare_recipe(tmp_path: Path) -> Path:
    """The small recipe's file without text or runs, for GPU tests on a machine without the corpus packages."""
    (tmp_path / "bare.toml").write_text(recipe_text(tmp_path))
    return tmp_path / "bare.toml"


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exclude objects of earlier modules from garbage collection, which a training triggers several times."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _quick() -> None:
    """Do not measure this machine's speed to derive a recipe's values."""
    measure_little()


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the console, which a command with --json silences."""
    from bessemer.common import console

    monkeypatch.setenv(console.QUIET, "")
    monkeypatch.delenv(console.QUIET)
    monkeypatch.setattr(console, "FIRST_LINE_SECONDS", 3600.0)  # so that the output does not depend on the load
