"""The recipe: all settings of a run as one frozen, validated value."""

from bessemer.recipe.batches import Batches
from bessemer.recipe.cleaning import Contamination, Dedup, EvaluationSet, Quality
from bessemer.recipe.corpus import Corpus, Extract, Language, PersonalData, Source, Work
from bessemer.recipe.keys import keys
from bessemer.recipe.load import differences, dump, is_as_dumped, load, parse, shipped, without_folders
from bessemer.recipe.model import Model
from bessemer.recipe.parallel import Parallel
from bessemer.recipe.resolved import ResolvedModel, ResolvedRecipe, ResolvedTrain, as_resolved, load_resolved
from bessemer.recipe.rules import Rules
from bessemer.recipe.schema import Evaluate, Guard, Recipe
from bessemer.recipe.tokens import MixturePhase
from bessemer.recipe.train import BatchRamp, Dropout, Masking, Optimizer, Train

__all__ = [
    "BatchRamp", "Batches", "Contamination", "Corpus", "Dedup", "Dropout", "Evaluate", "EvaluationSet", "Extract", "Guard",
    "Language", "Masking", "MixturePhase", "Model", "Optimizer", "Parallel", "PersonalData", "Quality", "Recipe",
    "ResolvedModel", "ResolvedRecipe", "ResolvedTrain", "Rules", "Source", "Train", "Work",
    "as_resolved", "differences", "dump", "is_as_dumped", "keys", "load", "load_resolved", "parse", "shipped",
    "without_folders",
]  # fmt: skip
