"""Gradients to updates: AdamW, Muon and Lion over the model's parameter groups, with their state in the asked format.

groups.py               which parameter belongs where: its rule, its decay, its share of the learning rate
elementwise.py          AdamW and Lion
muon.py                 orthogonalised momentum for matrices
low_precision_state.py  moments in bf16 or 8 bits
offload.py              moments in the CPU's memory
stepping.py             one optimizer out of these, and its state as plain named tensors
"""

from __future__ import annotations

import torch
from torch import nn

from bessemer.recipe import Optimizer as Settings
from bessemer.train.optimizer.groups import grouped
from bessemer.train.optimizer.low_precision_state import storage
from bessemer.train.optimizer.offload import Host
from bessemer.train.optimizer.stepping import Optimizer, load_state, state_tensors

__all__ = ["Optimizer", "build", "load_state", "set_learning_rate", "state_tensors"]


def build(model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer of a model whose parameters lie where they are trained.

    On CUDA, `offload` keeps the moments in pinned CPU memory; on a CPU they are there already and it changes nothing.
    """
    on_cuda = next(model.parameters()).device.type == "cuda"
    host = Host(pinned=True) if settings.offload and on_cuda else None
    return Optimizer(grouped(model, settings), settings, storage(settings.state), host)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]
