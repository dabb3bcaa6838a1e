"""Bessemer trains language models, from raw text to a verified, exported model."""

import importlib
from typing import Any

__version__ = "0.1.0"
# Public names, each loaded when it is first used; __init__.pyi has them for type checkers
EXPORTS = {
    "BessemerError": "bessemer.common.errors:BessemerError",
    "Callback": "bessemer.train.callback:Callback",
    "ConfigRule": "bessemer.model.huggingface.rules:ConfigRule",
    "Document": "bessemer.corpus.document:Document",
    "DocumentVerdict": "bessemer.corpus.global_steps:DocumentVerdict",
    "Filter": "bessemer.corpus.filters.base:Filter",
    "GlobalStep": "bessemer.corpus.global_steps:GlobalStep",
    "InputError": "bessemer.common.errors:InputError",
    "ModelFamily": "bessemer.model.huggingface.families:ModelFamily",
    "Moment": "bessemer.train.callback:Moment",
    "Objective": "bessemer.train.objective:Objective",
    "ParameterUpdate": "bessemer.train.update_rule:ParameterUpdate",
    "Part": "bessemer.corpus.readers.base:Part",
    "Predictions": "bessemer.train.objective:Predictions",
    "RateSchedule": "bessemer.train.schedule:RateSchedule",
    "Reader": "bessemer.corpus.readers.base:Reader",
    "Reject": "bessemer.corpus.document:Reject",
    "Sample": "bessemer.train.objective:Sample",
    "Stopped": "bessemer.common.errors:Stopped",
    "TextDataset": "bessemer.api.documents:TextDataset",
    "TextLoss": "bessemer.api.run:TextLoss",
    "TokenDataset": "bessemer.api.tokens:TokenDataset",
    "TrainingPlan": "bessemer.api.plan:TrainingPlan",
    "TrainingRun": "bessemer.api.run:TrainingRun",
    "Update": "bessemer.train.schedule:Update",
    "UpdateRule": "bessemer.train.update_rule:UpdateRule",
    "filters": "bessemer.corpus.filters.rules.sets:",
    "open_run": "bessemer.api.run:open_run",
    "open_tokens": "bessemer.api.tokens:open_tokens",
    "plan_training": "bessemer.api.plan:plan_training",
    "read": "bessemer.api.documents:read",
    "train_model": "bessemer.api.training:train_model",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = EXPORTS[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
