"""The public names, as type checkers see them."""

from bessemer.api.plan import TrainingPlan, plan_training
from bessemer.api.run import TextLoss, TrainingRun, open_run
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import Filter
from bessemer.corpus.filters.rules import sets as filters
from bessemer.corpus.global_steps import DocumentVerdict, GlobalStep
from bessemer.corpus.readers.base import Part, Reader
from bessemer.train.callback import Callback, Moment
from bessemer.train.schedule import RateSchedule, Update

__all__ = [
    "Callback",
    "Document",
    "DocumentVerdict",
    "Filter",
    "GlobalStep",
    "Moment",
    "Part",
    "RateSchedule",
    "Reader",
    "Reject",
    "TextLoss",
    "TrainingPlan",
    "TrainingRun",
    "Update",
    "filters",
    "open_run",
    "plan_training",
]
__version__: str
