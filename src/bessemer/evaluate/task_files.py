"""Loader of lm-evaluation-harness tasks.

A task is a YAML file in the harness's format, or the name of one of the harness's own tasks, which the harness downloads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError
from bessemer.common.hashing import digest

FEWSHOT_SEED = 1234  # the harness's default


@dataclass(frozen=True)
class EvaluationTask:
    """A task with its data.

    Attributes:
        name: Name of the task.
        reference: Name or file in the recipe.
        task: The harness's task object.
        files: Local data files.
        content: Digest of the task's prompts, targets and metrics.
    """

    name: str
    reference: str
    task: Any
    files: list[str]
    content: str


def open_tasks(references: Iterable[str]) -> list[EvaluationTask]:
    """Load tasks and build their requests.

    Args:
        references: YAML files and names of tasks.

    Raises:
        InputError: An extra is missing, a task cannot be loaded, or two tasks have the same name.
    """
    tasks: dict[str, EvaluationTask] = {}
    for reference in references:
        for task in _load(reference):
            if task.name in tasks:
                raise InputError(f"evaluate.tasks: two tasks are named {task.name}; rename one in its file")
            tasks[task.name] = task
    return list(tasks.values())


def _load(reference: str) -> list[EvaluationTask]:
    try:
        import lm_eval.api.task
        from datasets import disable_progress_bars
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as error:
        raise InputError(f"evaluate.tasks needs {error.name}; install it with: pip install 'bessemer[tasks]'") from None
    files: list[str] = []
    disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hides a warning for each default that a task uses
    lm_eval.api.task.tqdm = lambda items, **_: items  # its progress bar cannot be turned off and would overlap ours
    try:
        spec: Any = reference
        if is_file := reference.endswith(".yaml"):
            spec = load_yaml(reference)
            options = spec.get("dataset_kwargs") or {}
            if "data_files" in options:
                placed = _anchored(options["data_files"], Path(reference).parent, files)
                spec["dataset_kwargs"] = {**options, "data_files": placed}
        tasks = TaskManager(include_defaults=not is_file).load([spec])["tasks"]
        for task in tasks.values():
            task.set_fewshot_seed(FEWSHOT_SEED)
            task.build_all_requests()
        return [EvaluationTask(name, reference, task, files, _content(task)) for name, task in tasks.items()]
    except Exception as error:  # the harness, YAML, templates and data sets raise errors of many kinds
        why = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise InputError(f"evaluate.tasks: {reference} {' '.join(files)}: cannot be loaded: {why}") from error


def _anchored(files: Any, folder: Path, listed: list[str]) -> Any:
    """Return a task's `data_files` with its relative paths resolved against `folder`, and append each path to `listed`."""
    if isinstance(files, dict):
        return {split: _anchored(names, folder, listed) for split, names in files.items()}
    if isinstance(files, list):
        return [_anchored(file, folder, listed) for file in files]
    listed.append(files if "://" in files else str(folder / files))
    return listed[-1]


def _content(task: Any) -> str:
    """Return a digest of a task's prompts, targets and metrics, without its name and data paths."""
    requests = [(one.args, task.doc_to_target(one.doc)) for one in task.instances]
    return digest(task.OUTPUT_TYPE, task.config.metric_list, requests)[:16]


def main_score(task: dict[str, Any]) -> str:
    """Format the first score of a task's entry in evaluation.json."""
    name, score = next(iter(task["scores"].items()))
    return f"{task['name']}: {name} {score['value']:.3f}"
