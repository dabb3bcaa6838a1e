"""A worker: does one task after the other, in a process of this machine or of a cluster.

`python -m bessemer.corpus.worker` reads tasks as JSON lines from standard input and answers each with a JSON line.
It ends when its input ends, in the middle of a task if need be: a worker never outlives the build it works for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import bessemer
from bessemer.errors import BessemerError, InputError, Stopped

ATTEMPTS = 3
"""A task whose worker died so often is given up; once may be the machine's fault, three times is the task's."""

POLL_SECONDS = 0.1

Done = Callable[[dict[str, Any]], None]
Task = dict[str, Any]

KINDS = ("clean", "publish")
"""The tasks: a partition to clean, a bucket to publish."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment() -> dict[str, str]:
    """What a worker's process needs to find this package and to keep to one core."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    single = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "NUMBA_NUM_THREADS": "1", **single}


def gave_up(kind: str, task: Task, why: str) -> BessemerError:
    """The error for a task whose worker died each time."""
    name = task.get("number", f"{task.get('source')}, bucket {task.get('bucket')}")
    what = f"partition {name}" if kind == "clean" else f"source {name}"
    return BessemerError(
        f"corpus: {what}: its worker ended {ATTEMPTS} times ({why}); out of memory? Lower corpus.workers, or find the "
        f"document in {task['work']}; what is finished is kept, the same command goes on from here"
    )


def perform(kind: str, task: dict[str, Any]) -> dict[str, Any]:
    """Do one task here. Raises what the task raises."""
    if kind == "clean":
        from bessemer.corpus.partition import clean_partition

        found = clean_partition(task)
    elif kind == "publish":
        from bessemer.corpus.publish import publish_bucket

        found = publish_bucket(task)
    else:
        raise ValueError(f"{kind!r} is not a task; there are {', '.join(KINDS)}")
    _free()
    return found


def answer(kind: str, task: dict[str, Any]) -> dict[str, Any]:
    """Do one task and give its result, or its failure, as a value that can cross to another machine."""
    try:
        return {"result": perform(kind, task)}
    except OSError as error:
        return {"failure": "os", "errno": error.errno, "message": error.strerror or str(error), "file": error.filename}
    except BessemerError as error:
        name = next(name for name, cls in FAILURES.items() if isinstance(error, cls))
        return {"failure": name, "message": str(error)}
    except MemoryError:
        return {"failure": "memory", "message": "out of memory"}
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return {"failure": "bessemer", "message": f"corpus: the data engine failed: {type(error).__name__}: {first}"}


FAILURES: dict[str, type[BessemerError]] = {"stopped": Stopped, "input": InputError, "bessemer": BessemerError}


def result(given: dict[str, Any]) -> dict[str, Any]:
    """The result in an answer; raises the failure that it tells of."""
    if "result" in given:
        found: dict[str, Any] = given["result"]
        return found
    if given["failure"] == "os":
        raise OSError(given["errno"], given["message"], given["file"])
    if given["failure"] == "memory":
        raise MemoryError(given["message"])
    raise FAILURES[given["failure"]](given["message"])


def main() -> None:
    """Work until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C goes to the build, which ends its workers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    given: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            given.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    _one_thread()
    while True:
        task = json.loads(given.get())
        answers.write(json.dumps(answer(task["kind"], task["task"])) + "\n")
        answers.flush()


def _one_thread() -> None:
    """Workers share the cores: each uses one, and holds no more memory than one needs."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _free() -> None:
    """Hand memory that Arrow keeps for later back to the machine."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


if __name__ == "__main__":
    main()
