"""The base class of filters, and the built-in ones by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from bessemer.corpus.document import Document
from bessemer.recipe.uses import ExtensionBase

BUILT_IN: Mapping[str, str] = {}


class Reject(NamedTuple):
    """Why a filter rejects a document.

    Attributes:
        reason: A word for the reason, of a filter that has several.
        detail: The measured value, or what was found.
    """

    reason: str = ""
    detail: str = ""


class Filter(ExtensionBase, ABC):
    """Keeps, edits or rejects each document. Fields of a subclass are its settings.

    Attributes:
        reasons: The meaning of each reason for which it rejects, by its word.
    """

    reasons: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def judge(self, document: Document) -> Reject | str | None:
        """Return why a document is rejected, its edited text, or None to keep it as it is."""
