"""AdamW with decoupled weight decay, its parameter groups, and its state as plain named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bessemer.recipe import Optimizer


def build(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over three groups: decayed matrices, the input embedding, everything else.

    Norms are not decayed, nor are the embedding and the head unless `decay_embeddings`. Each group holds its share of
    the learning rate under "rate". Frozen parameters are in none.
    """
    assert settings.learning_rate is not None, "the recipe is resolved"
    tied = any(name == "head.weight" for name, _ in model.named_parameters(remove_duplicate=False)) and not any(
        name == "head.weight" for name, _ in model.named_parameters()
    )
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_vocabulary = name in ("embedding.weight", "head.weight")
        decayed = parameter.dim() >= 2 and (not is_vocabulary or settings.decay_embeddings)
        rate = settings.embedding_rate if name == "embedding.weight" and not tied else 1.0
        groups.setdefault((settings.weight_decay if decayed else 0.0, rate), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay, "rate": rate} for (decay, rate), parameters in groups.items()],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under the parameters' names: "NAME/exp_avg", "NAME/exp_avg_sq", "NAME/step"."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what state_tensors gave. Not through load_state_dict, which casts the state to the parameter's type."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters[name]
        place = torch.device("cpu") if kind == "step" and parameter.device.type == "cpu" else parameter.device
        optimizer.state[parameter][kind] = value.to(place)
