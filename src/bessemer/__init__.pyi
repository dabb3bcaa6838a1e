"""The public names, as type checkers see them."""

from bessemer.api.documents import TextDataset, read
from bessemer.api.plan import TrainingPlan, plan_training
from bessemer.api.run import TextLoss, TrainingRun, open_run
from bessemer.api.tokens import TokenDataset, open_tokens
from bessemer.api.training import train_model
from bessemer.common.errors import BessemerError, InputError, Stopped
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import Filter
from bessemer.corpus.filters.rules import sets as filters
from bessemer.corpus.global_steps import DocumentVerdict, GlobalStep
from bessemer.corpus.readers.base import Part, Reader
from bessemer.model.huggingface.families import ModelFamily
from bessemer.model.huggingface.rules import ConfigRule
from bessemer.train.callback import Callback, Moment
from bessemer.train.objective import Objective, Predictions, Sample
from bessemer.train.schedule import RateSchedule, Update
from bessemer.train.update_rule import ParameterUpdate, UpdateRule

__all__ = [
    "BessemerError",
    "Callback",
    "ConfigRule",
    "Document",
    "DocumentVerdict",
    "Filter",
    "GlobalStep",
    "InputError",
    "ModelFamily",
    "Moment",
    "Objective",
    "ParameterUpdate",
    "Part",
    "Predictions",
    "RateSchedule",
    "Reader",
    "Reject",
    "Sample",
    "Stopped",
    "TextDataset",
    "TextLoss",
    "TokenDataset",
    "TrainingPlan",
    "TrainingRun",
    "Update",
    "UpdateRule",
    "filters",
    "open_run",
    "open_tokens",
    "plan_training",
    "read",
    "train_model",
]
__version__: str
