"""What every worker does with a task, in whatever process and on whatever machine it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import bessemer
from bessemer.corpus import engine
from bessemer.corpus.work import CorpusTask
from bessemer.errors import BessemerError

ATTEMPTS = 3  # a task fails when its worker has died this often: once may be the machine's fault, not three times
SINGLE_THREAD = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# Where stores are, for workers on other machines; credentials are those of their machines
STORE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")

OnResult = Callable[[CorpusTask], None]


def perform(task: CorpusTask) -> None:
    """Do one task."""
    import pyarrow as pa

    task.run()
    pa.default_memory_pool().release_unused()


def answer(task: CorpusTask) -> Exception | None:
    """Do one task; the exception that it raised."""
    try:
        perform(task)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), error.filename)
    except (BessemerError, MemoryError) as error:
        return error
    except Exception as error:
        return BessemerError(f"{task.stage}: {task} failed: {type(error).__name__}: {engine.first_line(error)}")
    return None


def gave_up(task: CorpusTask, why: str, remedy: str = "") -> BessemerError:
    """The error for a task whose worker died too often; why: how it ended the last time."""
    remedy = remedy or f"out of memory? Then lower {task.stage}.workers"
    return BessemerError(
        f"{task.stage}: {task}: its worker ended {ATTEMPTS} times ({why}); {remedy}, or find the "
        f"document in {task.work}; finished work is kept, and the same command resumes here"
    )


def worker_environment() -> dict[str, str]:
    """What a worker needs to find this package and stores, and to use one core."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    stores = {name: os.environ[name] for name in STORE_VARIABLES if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **dict.fromkeys(SINGLE_THREAD, "1"), **stores}


def use_one_core() -> None:
    """Keep the libraries of this process to one core: workers share the cores of their machine."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
