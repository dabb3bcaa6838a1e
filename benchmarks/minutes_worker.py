"""One training of minutes.py: prepares its tokens, trains for some minutes, scores the held-out text, and prints JSON.

    PYTHON benchmarks/minutes_worker.py TRAINER --data FOLDER --minutes 5 [--seed 0] [--vocabulary 2048] [--checkout FOLDER]

The last line has the bits per byte of the held-out documents, and the steps, tokens, parameters and seconds of the training.
Trainers other than Bessemer run a few steps first, whose median gives the number of steps that their schedules need.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

CALIBRATION_STEPS = 24
END = "<|endoftext|>"
# The model of the trainers that have no recipe for a CPU and subword tokens: that of nanoGPT's recipe for a CPU, with our length.
LAYERS, WIDTH, HEADS, LENGTH, SEQUENCES = 4, 128, 4, 256, 16
RATE = 1e-3  # of nanoGPT's small models


def documents(data: Path, part: str) -> list[str]:
    return [json.loads(line)["text"] for line in (data / f"{part}.jsonl").read_text().splitlines()]


def bits_per_byte(
    nats_of: Callable[[Sequence[int]], float], encode: Callable[[str], list[int]], data: Path, length: int
) -> float:
    """Return the bits per byte of the held-out documents.

    `nats_of` returns the summed loss of ids[1:] of one window; `encode` includes the token before a document. Windows overlap by
    one token, which gives the first prediction of a window its only context.
    """
    texts, nats = documents(data, "held_out"), 0.0
    for text in texts:
        ids = encode(text)
        nats += sum(nats_of(ids[start : start + length + 1]) for start in range(0, len(ids) - 1, length))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def steps_for(minutes: float, seconds: Sequence[float]) -> int:
    """Return the steps that fit, from the seconds of the calibration's steps; the first ones warm up."""
    return int(60 * minutes / median(seconds[len(seconds) // 3 :]))


def bessemer(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train as `bessemer run FOLDER` does, with every value derived from the text and the machine."""
    from machine import parse_keys

    import bessemer as bs

    source = {"name": "text", "format": "jsonl", "paths": [str(arguments.data / "train.jsonl")]}
    recipe = {"corpus": {"sources": [source], "dedup": {"exact": False, "minhash": False}}}
    keys = {
        "run.dir": str(work), "run.name": "run", "run.seed": arguments.seed, "train.minutes": arguments.minutes,
        "tokenizer.vocabulary": arguments.vocabulary, "export.hf": False, "evaluate.prompts": [],
    }  # fmt: skip
    run = bs.train_model(recipe, keys=keys | parse_keys(arguments.set))
    texts = documents(arguments.data, "held_out")
    nats = sum(run.loss(text).nats for text in texts)
    stages = {stage["name"]: stage["seconds"] for stage in json.loads((run.path / "stages.json").read_text())["stages"]}
    last = run.metrics().to_pylist()[-1]
    return {
        "bits_per_byte": nats / math.log(2) / sum(len(text.encode()) for text in texts), "steps": last["step"],
        "tokens": last["tokens"], "seconds": stages["train"],
        "parameters": json.loads((run.path / "plan.json").read_text())["parameters"],
    }  # fmt: skip


def nanochat(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run scripts.base_train as runs/runcpu.sh does, with a depth that suits the minutes, after training its tokenizer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.environ |= {"NANOCHAT_BASE_DIR": str(work), "PYTHONPATH": arguments.checkout, "NANOCHAT_DTYPE": arguments.dtype}
    folder = work / "base_data_climbmix"
    folder.mkdir()
    texts = documents(arguments.data, "train")
    for number, part in enumerate((texts, texts[-8:])):  # the last file is its validation split, which is not used
        pq.write_table(pa.table({"text": part}), folder / f"shard_{number:05d}.parquet", row_group_size=1024)

    def call(module: str, *options: str) -> str:
        command = [sys.executable, "-m", module, *options]
        return subprocess.run(command, cwd=arguments.checkout, stdout=subprocess.PIPE, text=True, check=True).stdout

    call("scripts.tok_train", f"--vocab-size={arguments.vocabulary}")
    length, batch = arguments.length or 512, arguments.batch or 16384
    fixed = [
        f"--depth={arguments.depth or 4}", "--head-dim=64", "--window-pattern=L", f"--max-seq-len={length}",
        f"--device-batch-size={min(32, batch // length)}", f"--total-batch-size={batch}", "--eval-every=-1",
        "--core-metric-every=-1", "--sample-every=-1", "--device-type=cpu", *arguments.option,
    ]  # fmt: skip

    def train(steps: int) -> list[float]:
        lines = call("scripts.base_train", *fixed, f"--num-iterations={steps}").splitlines()
        return [float(line.split("dt: ")[1].split("ms")[0]) / 1000 for line in lines if line.startswith("step ")]

    steps = steps_for(arguments.minutes, train(CALIBRATION_STEPS))
    seconds = sum(train(steps))
    sys.path.insert(0, arguments.checkout)
    import torch
    from nanochat.checkpoint_manager import load_model_from_dir  # type: ignore[import-not-found]

    model, tokenizer, _ = load_model_from_dir(str(work / "base_checkpoints"), torch.device("cpu"), "eval")
    start = tokenizer.get_bos_token_id()

    @torch.no_grad()
    def nats_of(ids: Sequence[int]) -> float:
        rows, targets = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
        if len(ids) == 2:  # it takes no sequence of one token; -1 is no target
            rows, targets = torch.tensor([ids]), torch.tensor([[ids[1], -1]])
        return float(model(rows, targets, loss_reduction="sum"))

    score = bits_per_byte(nats_of, lambda text: tokenizer.encode(text, prepend=start), arguments.data, length)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "bits_per_byte": score,
        "steps": steps,
        "tokens": steps * batch,
        "seconds": seconds,
        "parameters": parameters,
    }


def byte_pairs(arguments: argparse.Namespace) -> tuple[Any, Callable[[str], list[int]]]:
    """Train a byte-level tokenizer, and return it with the function that encodes a document after its end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents(arguments.data, "train"), trainer)
    end = tokenizer.token_to_id(END) or 0  # the first id
    return tokenizer, lambda text: [end, *tokenizer.encode(text).ids]


def training_ids(arguments: argparse.Namespace, encode: Callable[[str], list[int]]) -> Any:
    import numpy as np

    return np.array([token for text in documents(arguments.data, "train") for token in encode(text)], dtype=np.uint16)


def score_logits(
    logits_of: Callable[[Any], Any], encode: Callable[[str], list[int]], arguments: argparse.Namespace
) -> float:
    import torch
    import torch.nn.functional as F

    @torch.no_grad()
    def nats_of(ids: Sequence[int]) -> float:
        rows = torch.tensor([ids])
        return float(F.cross_entropy(logits_of(rows[:, :-1])[0].float(), rows[0, 1:], reduction="sum"))

    return bits_per_byte(nats_of, encode, arguments.data, LENGTH)


def nanogpt(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run train.py with the README's settings for a CPU and the rates of config/train_shakespeare_char.py."""
    import re

    import torch

    _, encode = byte_pairs(arguments)
    ids, data = training_ids(arguments, encode), Path(arguments.checkout) / "data" / work.name
    data.mkdir(parents=True)
    for part in ("train", "val"):
        ids.tofile(data / f"{part}.bin")
    (data / "meta.pkl").write_bytes(__import__("pickle").dumps({"vocab_size": arguments.vocabulary}))

    def train(steps: int) -> list[float]:
        sizes = f"--n_layer={LAYERS} --n_head={HEADS} --n_embd={WIDTH} --block_size={LENGTH} --batch_size={SEQUENCES}"
        fixed = (
            "--device=cpu --compile=False --dropout=0.0 --eval_iters=1 --log_interval=1 --gradient_accumulation_steps=1"
        )
        rates = (
            f"--learning_rate={RATE} --min_lr={RATE / 10} --beta2=0.99 --warmup_iters=100 --always_save_checkpoint=True"
        )
        lengths = f"--max_iters={steps} --lr_decay_iters={steps} --eval_interval={steps}"
        command = [sys.executable, "train.py", *f"{sizes} {fixed} {rates} {lengths}".split(), f"--out_dir={work}"]
        command.append(f"--dataset={work.name}")
        done = subprocess.run(command, cwd=arguments.checkout, stdout=subprocess.PIPE, text=True, check=True)
        return [
            float(number) / 1000 for number in re.findall(r"^iter \d+: .*time ([\d.]+)ms", done.stdout, re.MULTILINE)
        ]

    try:
        steps = steps_for(arguments.minutes, train(CALIBRATION_STEPS))
        seconds = train(steps)
    finally:
        __import__("shutil").rmtree(data)
    sys.path.insert(0, arguments.checkout)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    saved = torch.load(work / "ckpt.pt", weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    score = score_logits(lambda rows: model(rows, rows)[0], encode, arguments)  # with targets, it returns all logits
    return {
        "bits_per_byte": score, "steps": steps, "tokens": steps * SEQUENCES * LENGTH, "seconds": sum(sorted(seconds)[:-1]),
        "parameters": model.get_num_params(non_embedding=False),
    }  # fmt: skip


def litgpt(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Call litgpt.pretrain.setup on a small Llama."""
    import torch
    from litgpt import GPT, Config  # type: ignore[import-not-found]
    from litgpt.args import EvalArgs, TrainArgs  # type: ignore[import-not-found]
    from litgpt.data import DataModule  # type: ignore[import-not-found]
    from litgpt.pretrain import setup  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader

    sys.argv[1:] = ["minutes"]  # litgpt parses the command line again, to store its settings
    _, encode = byte_pairs(arguments)
    ids = torch.from_numpy(training_ids(arguments, encode).astype("int32"))
    rows = ids[: (len(ids) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)

    class Rows(DataModule):  # type: ignore[misc]
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
            self.batch_size = batch_size

        def loader(self, shuffle: bool) -> Any:
            return DataLoader(rows, self.batch_size, shuffle=shuffle, drop_last=True)

        def train_dataloader(self) -> Any:
            return self.loader(True)

        def val_dataloader(self) -> Any:
            return self.loader(False)

    config = Config(
        name="minutes", block_size=LENGTH, vocab_size=arguments.vocabulary, padded_vocab_size=arguments.vocabulary,
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=3 * WIDTH,
    )  # fmt: skip
    times: list[float] = []

    def train(steps: int, folder: Path) -> list[float]:
        settings = TrainArgs(
            save_interval=None, log_interval=1, global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES,
            max_tokens=steps * SEQUENCES * LENGTH, max_norm=1.0, min_lr=RATE / 10, lr_warmup_steps=min(100, steps // 4),
            tie_embeddings=False,
        )  # fmt: skip
        optimizer = {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": RATE, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        }
        setup(
            "minutes", model_config=config, out_dir=folder, precision=arguments.precision, data=Rows(), train=settings,
            eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False), optimizer=optimizer, devices=1,
            logger_name="csv", seed=arguments.seed,
        )  # fmt: skip
        import csv

        times[:] = [
            float(row["iter_time"]) for file in folder.rglob("metrics.csv") for row in csv.DictReader(file.open())
        ]
        return list(times)

    steps = steps_for(arguments.minutes, train(CALIBRATION_STEPS, work / "calibration"))
    seconds = train(steps, work / "training")
    model = GPT(config)
    weights = torch.load(work / "training" / "final" / "lit_model.pth", weights_only=False)  # it holds the loader too
    model.load_state_dict(weights.get("model", weights))
    return {
        "bits_per_byte": score_logits(model, encode, arguments), "steps": steps, "tokens": steps * SEQUENCES * LENGTH,
        "seconds": sum(seconds), "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def trainer(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train a small Llama with transformers.Trainer, as its example run_clm.py does with packed blocks of text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    _, encode = byte_pairs(arguments)
    ids = torch.from_numpy(training_ids(arguments, encode).astype("int64"))
    rows = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)]
    config = LlamaConfig(
        vocab_size=arguments.vocabulary, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times = [perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(perf_counter())

    def train(steps: int) -> tuple[Any, list[float]]:
        set_seed(arguments.seed)
        model, clock = LlamaForCausalLM(config), Clock()
        settings = TrainingArguments(
            str(work), max_steps=steps, per_device_train_batch_size=SEQUENCES, learning_rate=RATE, weight_decay=0.1,
            adam_beta2=0.95, lr_scheduler_type="cosine", warmup_steps=min(100, steps // 4), bf16=arguments.precision != "32-true",
            use_cpu=True, save_strategy="no", report_to=[], seed=arguments.seed, disable_tqdm=True, logging_steps=10**9,
        )  # fmt: skip
        Trainer(model, settings, train_dataset=rows, callbacks=[clock]).train()
        return model, [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]

    steps = steps_for(arguments.minutes, train(CALIBRATION_STEPS)[1])
    model, seconds = train(steps)
    score = score_logits(lambda rows: model.eval()(rows).logits, encode, arguments)
    return {
        "bits_per_byte": score, "steps": steps, "tokens": steps * SEQUENCES * LENGTH, "seconds": sum(seconds),
        "parameters": model.num_parameters(),
    }  # fmt: skip


TRAINERS = {"bessemer": bessemer, "nanochat": nanochat, "nanogpt": nanogpt, "litgpt": litgpt, "trainer": trainer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and held_out.jsonl")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--checkout", default="", help="folder of nanochat or nanoGPT")
    parser.add_argument("--depth", type=int, help="nanochat's --depth")
    parser.add_argument("--length", type=int, help="nanochat's --max-seq-len")
    parser.add_argument("--batch", type=int, help="nanochat's --total-batch-size")
    parser.add_argument("--dtype", default="float32", help="NANOCHAT_DTYPE")
    parser.add_argument("--option", action="append", default=[], help="further option of nanochat")
    parser.add_argument("--precision", default="bf16-mixed", help="bf16-mixed or 32-true, for litgpt and Trainer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="key of Bessemer's recipe")
    arguments = parser.parse_args()
    started = perf_counter()
    with TemporaryDirectory() as work, redirect_stdout(sys.stderr):
        row = TRAINERS[arguments.trainer](arguments, Path(work))
    print(json.dumps(row | {"wall_seconds": round(perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
