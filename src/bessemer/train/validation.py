"""Held-out loss and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bessemer.tokens.held_out import HeldOut
from bessemer.train.objective import chunked_cross_entropy
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class Validation:
    """loss: nats a token of text; bits_per_byte: nats / ln 2 / bytes of text, which no tokenizer can flatter."""

    loss: float
    bits_per_byte: float
    bits_per_byte_by_source: dict[str, float]
    loss_by_source: dict[str, float]
    tokens: int
    bytes: int


@torch.no_grad()
def validate(step: TrainStep, parts: list[HeldOut], advance: Callable[..., None] = lambda amount: None) -> Validation:
    """Score held-out sequences in a fixed order. End-of-text tokens count neither as loss nor as bytes."""
    nats: dict[str, float] = {}
    tokens: dict[str, int] = {}
    batch = step.settings.micro_batch or 1  # so that a validation never needs more memory than a step
    for part in parts:
        total = 0.0
        for start in range(0, len(part.tokens), batch):
            rows = slice(start, start + batch)
            sequences = torch.from_numpy(part.tokens[rows]).to(step.device.place)
            valid = torch.from_numpy(part.valid[rows]).to(step.device.place)
            inputs_BT = sequences[:, :-1]
            with step.autocast():
                hidden_BTD = step.model(inputs_BT, step.documents(inputs_BT))
                loss = chunked_cross_entropy(
                    hidden_BTD.flatten(0, 1),
                    step.model.head.weight,
                    torch.where(valid, sequences[:, 1:], -1).flatten(),
                    chunk=step.settings.loss_chunk,
                )
            total += float(loss.nats_N.double().sum())
            advance(int(part.valid[rows].sum()))
        nats[part.source], tokens[part.source] = total, int(part.valid.sum())
    bytes_of = {part.source: int(part.bytes.sum()) for part in parts}
    all_bytes, all_tokens = sum(bytes_of.values()), sum(tokens.values())
    return Validation(
        loss=sum(nats.values()) / max(all_tokens, 1),
        bits_per_byte=sum(nats.values()) / math.log(2) / max(all_bytes, 1),
        bits_per_byte_by_source={name: nats[name] / math.log(2) / max(bytes_of[name], 1) for name in nats},
        loss_by_source={name: nats[name] / max(tokens[name], 1) for name in nats},
        tokens=all_tokens,
        bytes=all_bytes,
    )
