"""A user's filter and callback, defined at the top level of a file."""

from __future__ import annotations

from bessemer import Callback, Document, Filter, Reject
from bessemer.train.callback import Moment


class NoWord(Filter):
    """Reject documents with a word."""

    word: str = "none"

    def judge(self, document: Document) -> Reject | None:
        return Reject("word", self.word) if self.word in document.text else None


class WriteSteps(Callback):
    """Write each logged step to a file."""

    file: str

    def step(self, moment: Moment) -> None:
        if moment.is_main:
            with open(self.file, "a") as file:
                file.write(f"{moment.step}\n")
