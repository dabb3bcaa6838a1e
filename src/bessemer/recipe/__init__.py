"""The recipe: one run as one frozen, validated value."""

from bessemer.recipe.batches import Batches
from bessemer.recipe.contamination import Contamination, EvaluationSet
from bessemer.recipe.corpus import Corpus, Source
from bessemer.recipe.dedup import Dedup, Paragraphs, Substrings
from bessemer.recipe.extract import Extract
from bessemer.recipe.keys import explain, keys
from bessemer.recipe.language import Language
from bessemer.recipe.load import differences, digest, dump, is_text, load, parse, recipe_for_text, shipped
from bessemer.recipe.mixture import MixturePhase
from bessemer.recipe.model import Model
from bessemer.recipe.objective import Classify, Masking
from bessemer.recipe.optimization import BatchRamp, Dropout, Optimizer, Schedule
from bessemer.recipe.parallel import Parallel, PipelineSchedule
from bessemer.recipe.personal import PersonalData
from bessemer.recipe.quality import Quality
from bessemer.recipe.rules import Rules
from bessemer.recipe.schema import (
    Checkpoint,
    Evaluate,
    Guard,
    Recipe,
    Run,
    Train,
)
from bessemer.recipe.tokenizer import Tokenizer, TokenSource
from bessemer.recipe.tokens import Tokens
from bessemer.recipe.work import Work

__all__ = [
    "BatchRamp", "Batches", "Checkpoint", "Classify", "Contamination", "Corpus", "Dedup", "Dropout", "Evaluate", "EvaluationSet",
    "Extract", "Guard", "Language", "Masking", "MixturePhase", "Model", "Optimizer", "Paragraphs", "Parallel", "PersonalData",
    "PipelineSchedule",
    "Quality", "Recipe", "Rules", "Run", "Schedule", "Source", "Substrings", "TokenSource", "Tokenizer", "Tokens",
    "Train", "Work", "differences", "digest", "dump", "explain", "is_text", "keys", "load", "parse",
    "recipe_for_text", "shipped",
]  # fmt: skip
