"""A small model, its recipe and batches for trainings on several processes."""

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from bessemer.distributed.mesh import ProcessMesh
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import ResolvedRecipe
from bessemer.recipe.load import parse
from bessemer.tokens.loader import Batch
from bessemer.train.device import choose
from bessemer.train.parallelize import initial_weights
from bessemer.train.trainer import Trainer

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 64
TEXT = "[run]\nname = 't'\n[model]\ndepth = 2\n[tokens]\nsequence_length = 16\n"


def recipe_of(precision: str, **train: Any) -> ResolvedRecipe:
    batch = {"global_batch_tokens": SEQUENCES * LENGTH, "micro_batch": 1}
    settings = {"steps": 4, "precision": precision, **batch, **train}
    given = parse(TEXT, "test")
    optimizer = given.train.optimizer.model_copy(
        update={"learning_rate": 1e-2, "betas": (0.9, 0.95), **settings.pop("optimizer", {})}
    )
    changed = given.model_copy(update={"train": given.train.model_copy(update={**settings, "optimizer": optimizer})})
    return resolve(changed, VOCABULARY)


def config_of(tied: bool = False) -> ModelConfig:
    given = parse(TEXT, "test")
    model = given.model.model_copy(
        update={"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 64, "tie_embeddings": tied}
    )
    return model_config(given.model_copy(update={"model": model}), VOCABULARY)


def batches(count: int) -> list[Batch]:
    draw = np.random.default_rng(0)
    return [
        Batch.next_token(
            step * SEQUENCES, draw.integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1)), draw.integers(0, 2, SEQUENCES)
        )
        for step in range(count)
    ]


def part(batch: Batch, mesh: ProcessMesh) -> Batch:
    return batch.part(mesh.data_rank, mesh.layout.data)


def trainer_on(mesh: ProcessMesh, recipe: ResolvedRecipe, config: ModelConfig) -> Trainer:
    """Build a trainer on a mesh, with the weights of seed 3."""
    model = build_model(config, 3) if mesh.is_single else meta_model(config)
    return Trainer(recipe, model, choose(recipe.train), 0, 2, mesh, initial_weights(config, 3))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
