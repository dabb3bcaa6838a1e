"""Variants of a recipe on the same tokens: held-out bits per byte after equal steps or equal minutes, with seeds.

A variant is a set of keys. The corpus and the tokens are built once, and each variant trains on them in turn, seed by seed, so a
machine that slows down slows all of them. A second call with the same file trains only what it lacks.

    python benchmarks/ablations.py --recipe demo --keys train.steps=400 --seeds 3 --json FILE \
        --variant "two heads: model.heads=2 model.kv_heads=2" --variant "fast embedding: train.optimizer.embedding_rate=8"
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from machine import describe, parse_keys

import bessemer as bs
from bessemer.api.tokens import TokenDataset
from bessemer.recipe import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="keys of all variants")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME: KEY=VALUE ...")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tokens", type=Path, help="folder that keeps the tokens for a later call")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"rows": []}
    result.setdefault("machine", describe(recipe=arguments.recipe, keys=arguments.keys))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load(arguments.recipe).model_dump(mode="json", by_alias=True, exclude_unset=True)
        tokens = tokens_of(recipe, arguments.tokens or Path(scratch) / "tokens")
        for seed in range(arguments.seeds):
            for variant in ["unchanged:", *arguments.variant]:
                name, _, changes = variant.partition(":")
                if any(row["variant"] == name and row["seed"] == seed for row in result["rows"]):
                    continue
                keys = parse_keys((*arguments.keys, *changes.split()))
                row = {"variant": name, "keys": changes.strip(), "seed": seed}
                row |= score(recipe, tokens, keys | {"run.seed": seed}, Path(scratch) / f"{len(result['rows'])}")
                result["rows"].append(row)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
                print(json.dumps(row), flush=True)
    for name in dict.fromkeys(row["variant"] for row in result["rows"]):
        scores = [row["bits_per_byte"] for row in result["rows"] if row["variant"] == name]
        print(
            f"{name:32} {mean(scores):.4f} bits per byte, {min(scores):.4f} to {max(scores):.4f}, {len(scores)} seeds"
        )


def tokens_of(recipe: dict[str, Any], folder: Path) -> Any:
    """Return the tokens of a recipe, which are built if the folder has none."""
    if folder.exists():
        return bs.open_tokens(folder)
    return TokenDataset({key: recipe[key] for key in ("corpus", "tokenizer", "tokens") if key in recipe}).write(folder)


def score(recipe: dict[str, Any], tokens: Any, keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a variant, and return its last validation with the seconds of its training."""
    tables = {key: value for key, value in recipe.items() if key not in ("corpus", "tokenizer", "tokens", "run")}
    if "train.steps" in keys:
        tables["train"] = {key: value for key, value in recipe["train"].items() if key != "minutes"}
    fixed = {"run.dir": str(folder), "run.name": "run", "export.hf": False, "evaluate.prompts": []}
    run = bs.train_model(tables, tokens=tokens, keys=fixed | keys)
    last = run.metrics("validation").to_pylist()[-1]
    stages = {stage["name"]: stage["seconds"] for stage in json.loads((run.path / "stages.json").read_text())["stages"]}
    return {
        "bits_per_byte": round(last["bits_per_byte"], 4),
        "steps": last["step"],
        "seconds": round(stages["train"], 1),
    }


if __name__ == "__main__":
    main()
