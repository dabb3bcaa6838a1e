"""Hashes of losses, shards and weights of small runs, to compare two commits: a refactoring keeps all equal.

Each case is a recipe on generated text; the cases cover families, objectives, optimizers, precisions and layouts. The script
trains them with the package that Python imports, and records the SHA-256 of the token shards, of the losses of all steps, and of
the final weights. Equal digests need the same machine and the same versions.

    PYTHONPATH=OLD/src python benchmarks/digests.py --out before.json
    PYTHONPATH=NEW/src python benchmarks/digests.py --against before.json     exits with 1 if a case differs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

CASES: dict[str, tuple[str, ...]] = {
    "qwen3": (),
    "llama": ("model.family=llama",),
    "gpt2": ("model.family=gpt2",),
    "gemma3": ("model.family=gemma3", "model.window=8", "model.global_every=2"),
    "bert-masked": ("model.family=bert", "model.kv_heads=2", "train.objective=masked"),
    "classify": ("train.objective=classify",),
    "muon": ("train.optimizer.kind=muon",),
    "lion-ema": ("train.optimizer.kind=lion", "train.optimizer.learning_rate=0.001", "train.ema=0.9"),
    "bf16": ("train.precision=bf16",),
    "dropout-wsd": ("train.dropout.hidden=0.1", "train.schedule.kind=wsd"),
    "packed": ("tokens.packing=best-fit", "tokens.document_mask=true"),
    "accumulated": ("train.micro_batch=2", "train.recompute=full"),
    "replicate": ("parallel.replicate=2",),
    "shard": ("parallel.shard=2", "train.optimizer.kind=muon"),
    "tensor": ("model.kv_heads=2", "parallel.tensor=2"),
    "pipeline": ("parallel.pipeline=2", "train.micro_batch=2"),
    "context": ("model.kv_heads=2", "parallel.context=2"),
}
RECIPE = """
[run]
name = "small"
dir = "{folder}/runs"
seed = 3

[[corpus.sources]]
name = "prose"
format = "text"
paths = ["{folder}/text/prose"]
label = "prose"

[[corpus.sources]]
name = "code"
format = "code"
paths = ["{folder}/text/code"]
label = "code"

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
steps = 12
log_every = 1
global_batch_tokens = 256
micro_batch = 4
device = "cpu"
precision = "fp32"

[train.optimizer]
learning_rate = 0.01

[checkpoint]
every = 8
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the digests")
    parser.add_argument("--against", type=Path, help="digests of an earlier call to compare with")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / "text")
        (Path(folder) / "small.toml").write_text(RECIPE.format(folder=folder))
        for case in options.only:
            found[case] = trained(Path(folder), case)
            print(f"{case:<12} {found[case]}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads(options.against.read_text()) if options.against else found
    differing = [case for case in found if before.get(case) != found[case] or "error" in found[case]]
    print(f"differing or failed: {', '.join(differing)}" if differing else "all equal")
    return int(bool(differing))


def write_text(folder: Path) -> None:
    """Write two sources of generated text."""
    draw = random.Random(0)
    words = [
        f"{a}{b}"
        for a in ("st", "pl", "br", "m", "tr", "gl")
        for b in ("one", "ain", "ush", "ile", "end", "oat", "ick")
    ]
    for kind in ("prose", "code"):
        (folder / kind).mkdir(parents=True)
    for number in range(60):
        sentences = [" ".join(draw.choices(words, k=9)).capitalize() + "." for _ in range(12)]
        (folder / "prose" / f"{number:03d}.txt").write_text("\n".join(sentences) + "\n")
        lines = [
            f"def {a}({b}):\n    return {b} + {draw.randint(0, 999)}\n"
            for a, b in (draw.sample(words, 2) for _ in range(5))
        ]
        (folder / "code" / f"{number:03d}.py").write_text("\n".join(lines))


def trained(folder: Path, case: str) -> dict[str, str]:
    """Train a case and return its digests, or the last line of its error."""
    sets = [part for override in (f"run.name={case}", *CASES[case]) for part in ("--set", override)]
    for command in ("corpus", "tokens", "train"):
        line = [sys.executable, "-m", "bessemer", command, str(folder / "small.toml"), *sets]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    run = folder / "runs" / case
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    newest = max((run / "checkpoints").glob("step-*"))
    return {
        "tokens": hashed(*sorted((run / "tokens").glob("*.bin"))),
        "losses": hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16],
        "last_loss": f"{losses[-1]:.6f}",
        "weights": hashed(*sorted(newest.glob("model*.safetensors"))),
    }


def hashed(*paths: Path) -> str:
    """Return the first 16 digits of the SHA-256 of the concatenated files."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
