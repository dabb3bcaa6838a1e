"""Scoring of a recipe's tasks during training."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from bessemer.evaluate.task_files import open_tasks
from bessemer.recipe import Evaluate
from bessemer.train.setup import ScoredModel, TaskScorer


def task_scorer(options: Evaluate) -> TaskScorer | None:
    """Return a function that scores a model on the first `task_items` items of each task; None if the recipe has no tasks.

    The function takes the model and a progress callback and returns {score: {task: value}}. Its entry `content` maps each
    task to a number that changes with the task's prompts, targets or metrics.
    """
    if not options.tasks:
        return None
    tasks = cache(open_tasks)  # loads the tasks at the first scoring

    def score(subject: ScoredModel, advance: Callable[..., None]) -> dict[str, dict[str, float]]:
        from bessemer.evaluate.harness import score_task

        by_score: dict[str, dict[str, float]] = {}
        for task in tasks(options.tasks):
            scored, _ = score_task(task, subject, options.task_items, advance)
            by_score.setdefault("content", {})[task.name] = int(task.content[:12], 16)
            for name, value in scored["scores"].items():
                by_score.setdefault(name, {})[task.name] = value["value"]
        return by_score

    return score
