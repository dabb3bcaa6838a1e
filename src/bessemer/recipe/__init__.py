"""The recipe: one run as one frozen, validated value."""

from bessemer.recipe.batches import Batches
from bessemer.recipe.corpus import Corpus, Dedup, Source
from bessemer.recipe.load import differences, digest, dump, explain, keys, load, parse, shipped
from bessemer.recipe.model import Model
from bessemer.recipe.objective import Classify, Masking
from bessemer.recipe.optimization import BatchRamp, Optimizer, Schedule
from bessemer.recipe.rules import Rules
from bessemer.recipe.schema import (
    Checkpoint,
    Evaluate,
    Guard,
    Recipe,
    Run,
    Train,
)
from bessemer.recipe.tokens import Tokenizer, Tokens

__all__ = [
    "BatchRamp", "Batches", "Checkpoint", "Classify", "Corpus", "Dedup", "Evaluate", "Guard", "Masking", "Model",
    "Optimizer", "Recipe", "Rules", "Run", "Schedule", "Source", "Tokenizer", "Tokens", "Train", "differences", "digest",
    "dump", "explain", "keys", "load", "parse", "shipped",
]  # fmt: skip
