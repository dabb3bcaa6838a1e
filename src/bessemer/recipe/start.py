"""What a recipe with train.start takes over from the run that it starts from, where it says nothing itself.

The model's dimensions and options, the tokenizer, the length of the sequences, and a learning rate: CONTINUED_RATE of the peak
that run was trained with, warmed up from nothing like any other. Coming back to the whole peak adapts fastest to new text
and forgets most of the old; some warming up is needed to adapt at all (Gupta et al. 2023; Ibrahim et al. 2024, who come back
to the whole peak with at least 1% of old text mixed in).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from bessemer.errors import InputError

CONTINUED_RATE = 0.1
SIZES = ("depth", "layers", "width", "heads")


def follow_start(values: dict[str, Any], folder: Path) -> None:
    """Fill in what follows from train.start. values: a recipe before validation, changed in place; folder: of its file.

    A recipe that gives the model's size keeps its [model] as it is. Raises InputError when nothing says the model.
    """
    train = values.get("train")
    if not isinstance(train, dict) or not isinstance(train.get("start"), str) or not train["start"]:
        return
    start = folder / Path(train["start"]).expanduser()
    model, theirs = values.setdefault("model", {}), start_recipe(start)
    if not isinstance(model, dict):
        return
    if theirs is None:
        if not any(key in model for key in (*SIZES, "from")):
            raise InputError(
                f"train.start: {start}: no recipe.toml there, so nothing says the model; name the folder of a trained run"
            )
        return
    if not any(key in model for key in (*SIZES, "from")):
        values["model"] = {key: value for key, value in theirs["model"].items() if key != "from"} | model
    _tokenizer(values, theirs, start)
    _learning_rate(train, theirs["train"], start)


def start_recipe(start: Path) -> dict[str, Any] | None:
    """The resolved recipe of the run to start from; None where there is none."""
    try:
        found = tomllib.loads((start / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if {"model", "train"} <= found.keys() else None


def _tokenizer(values: dict[str, Any], theirs: dict[str, Any], start: Path) -> None:
    tokenizer, tokens = values.setdefault("tokenizer", {}), values.setdefault("tokens", {})
    if isinstance(tokenizer, dict) and not {"path", "vocabulary"} & tokenizer.keys():
        tokenizer["path"] = str((start / "tokens" / "tokenizer.json").absolute())
        for key in ("end_of_text", "mask_token"):
            if key in theirs.get("tokenizer", {}):
                tokenizer.setdefault(key, theirs["tokenizer"][key])
    if isinstance(tokens, dict) and "sequence_length" in theirs.get("tokens", {}):
        tokens.setdefault("sequence_length", theirs["tokens"]["sequence_length"])


def _learning_rate(train: dict[str, Any], theirs: dict[str, Any], start: Path) -> None:
    """A share of the run's peak, where it was trained for the same objective by the same optimizer."""
    optimizer, before = train.setdefault("optimizer", {}), theirs.get("optimizer", {})
    if not isinstance(optimizer, dict) or "learning_rate" in optimizer or "learning_rate" not in before:
        return
    same = train.get("objective", "causal") == theirs.get("objective", "causal")
    kind = optimizer.get("kind", "adamw") == before.get("kind", "adamw")
    if same and kind and not _is_imported(start):
        optimizer["learning_rate"] = float(f"{CONTINUED_RATE * before['learning_rate']:.4g}")


def _is_imported(start: Path) -> bool:
    """Whether the run was never trained here, so that its recipe has no rate that it was trained with."""
    latest = start / "checkpoints" / "latest"
    return latest.is_file() and latest.read_text().strip() == "step-00000000"
