"""A batch script for Slurm: one task a node, which keeps the node's processes; stopped in time and queued again.

Sources: sbatch(1), srun(1), scontrol(1) of Slurm 24.11. What they say that shapes the script:
- `--signal=B:USR1@N` reaches the batch shell alone; it passes the signal on. It must not be SIGTERM: srun answers that by
  killing its tasks.
- A job that ends with 75 has saved everything and is not done; `scontrol requeue` puts it back under its own number.
- `--requeue` lets Slurm itself do so after a node has failed or the job has been preempted.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from bessemer.recipe import Recipe


def script(recipe: Recipe, folder: Path) -> str:
    """The script of a recipe that lies as recipe.toml in `folder`, an absolute path that all nodes see."""
    return f"""#!/bin/bash
# {recipe.run.name}: {recipe.parallel.world} processes on {recipe.cluster.nodes} nodes. Written by `bessemer launch`.
# Start it:  sbatch {shlex.quote(str(folder / "train.sbatch"))}
{_options(recipe, folder)}
set -uo pipefail
{_preamble(recipe)}
# Output appears as it is written; a crash in native code leaves the Python stack; NCCL says what goes wrong.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 NCCL_DEBUG="${{NCCL_DEBUG:-WARN}}"
# A lost neighbour ends a process, which is then started again, and does not leave it waiting (torch's default, made sure).
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# Since Slurm 22.05 srun does not take --cpus-per-task over from sbatch.
if [[ -n "${{SLURM_CPUS_PER_TASK:-}}" ]]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

run={shlex.quote(str(recipe.run.folder))}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({recipe.cluster.port} + SLURM_JOB_ID % 1000))  # two jobs that share a node do not meet
before=$(cat "$run/checkpoints/latest" 2>/dev/null)

srun {_step(recipe)} \\
  {_program(recipe)} train {shlex.quote(str(folder / "recipe.toml"))} \\
  --nnodes {_nodes(recipe)} --nproc-per-node {recipe.parallel.world // recipe.cluster.nodes} \\
  --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" &
step=$!
trap 'kill -USR1 "$step"' USR1  # not TERM: srun would kill its tasks

# A trapped signal ends `wait` early; what counts is how the step ended, which bash remembers.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?

if ((code == 75)); then  # stopped on request, everything saved
  if [[ "$(cat "$run/checkpoints/latest" 2>/dev/null)" == "$before" ]]; then
    echo "no step was saved since the job began: not queued again; give it more time (cluster.time)" >&2
  else
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  fi
fi
exit "$code"
"""


def _options(recipe: Recipe, folder: Path) -> str:
    cluster, each = recipe.cluster, recipe.parallel.world // recipe.cluster.nodes
    fewest = cluster.min_nodes or cluster.nodes
    options: dict[str, object] = {
        "job-name": recipe.run.name,
        "nodes": cluster.nodes if fewest == cluster.nodes else f"{fewest}-{cluster.nodes}",
        "ntasks-per-node": 1,
    }
    if recipe.train.device != "cpu":
        options["gpus-per-node"] = each
    options["cpus-per-task"] = cluster.cpus_per_process * each  # slurm's own default is one for all of them
    options["mem"] = (cluster.memory or "0").removesuffix("i")  # 0: all of a node's; slurm's G are GiB
    options["time"] = cluster.time
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(cluster, name)) is not None:
            options[name] = value
    options |= {
        "signal": f"B:USR1@{cluster.save_seconds}",
        "requeue": None,
        "open-mode": "append",
        "output": _quoted(f"{folder}/logs/%x-%j.out"),
    }
    if fewest != cluster.nodes:
        options["no-kill"] = None  # a lost node does not end the job
    return "\n".join(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items())


def _quoted(path: str) -> str:
    """A path in an #SBATCH line, where double quotes hold words together."""
    return path if shlex.quote(path) == path or not any(letter.isspace() for letter in path) else f'"{path}"'


def _preamble(recipe: Recipe) -> str:
    return "\n".join(recipe.cluster.setup) + "\n" if recipe.cluster.setup else ""


def _step(recipe: Recipe) -> str:
    cluster, several = recipe.cluster, recipe.cluster.min_nodes not in (None, recipe.cluster.nodes)
    # With fewer nodes allowed, the end of one is not the end of the others.
    options = ["--label", "--no-kill --kill-on-bad-exit=0 --wait=0" if several else "--kill-on-bad-exit=1"]
    if cluster.image is not None:
        options.append(f"--container-image={shlex.quote(cluster.image)}")
    if cluster.mounts:
        options.append(f"--container-mounts={shlex.quote(','.join(cluster.mounts))}")
    return " ".join(options)


def _nodes(recipe: Recipe) -> str:
    cluster = recipe.cluster
    fewest = cluster.min_nodes or cluster.nodes
    return str(cluster.nodes) if fewest == cluster.nodes else f'"{fewest}:$SLURM_JOB_NUM_NODES"'


def _program(recipe: Recipe) -> str:
    return "bessemer" if recipe.cluster.image is not None else f"{shlex.quote(sys.executable)} -m bessemer"
