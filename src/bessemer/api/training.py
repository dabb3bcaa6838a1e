"""Training from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.api.keys import make_recipe, require_part, run_table, use_of, with_keys, write_overrides
from bessemer.api.run import TrainingRun
from bessemer.common.console import say
from bessemer.common.extensions import reference_to
from bessemer.recipe import load
from bessemer.recipe.uses import Use
from bessemer.run.directory import RunDirectory
from bessemer.workflow import preflight, stages
from bessemer.workflow.choose_layout import with_chosen_layout
from bessemer.workflow.session import Session

if TYPE_CHECKING:
    from bessemer.api.tokens import TokenDataset
    from bessemer.train.callback import Callback


def train_model(
    recipe: str | Path | Mapping[str, Any] | None = None, *, tokens: TokenDataset | None = None,
    callbacks: Sequence[Callback] = (), keys: Mapping[str, Any] | None = None,
) -> TrainingRun:  # fmt: skip
    """Train, evaluate and export a model as `bessemer run` does, or resume an existing run.

    Args:
        recipe: A recipe file, the name of a shipped recipe, a text file to train on, or a mapping of tables or dotted keys
            to values. None: use `keys` alone.
        tokens: Tokens to train on, in place of the recipe's corpus and tokenizer. None: build the recipe's tokens.
        callbacks: Callbacks to call after those of the recipe. A training with one process calls these objects. With several,
            each process imports the class and creates its own instance, so a class defined in a notebook cell is an error.
        keys: Keys of the recipe with their values, such as `{"train.steps": 100}`. Without `run.name`, a run trained on
            `tokens` uses the run directory of these tokens.

    Returns:
        The run.

    Raises:
        InputError: An argument is invalid, or the run directory holds another training.
        BessemerError: The training failed, or was stopped (`Stopped`). Repeat the call to resume it.
    """
    if isinstance(recipe, (str, Path)):
        where, loaded = str(recipe), load(recipe, write_overrides(keys or {}), trust_code=False)
        values = loaded.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    else:
        where, values = "keys", with_keys(with_keys({}, recipe or {}), keys or {})
    if tokens is not None:
        if tokens.tables and {"corpus", "tokenizer"} & values.keys():
            say("  the corpus and tokenizer of the tokens replace those of the recipe")
        table = run_table(tokens.path) if tokens.path is not None else {}
        values = with_keys(
            {**table, **values, **({"corpus": {}, "tokenizer": {}} if tokens.tables else {})}, tokens.tables
        )
    for one in callbacks:
        require_part("callbacks", one)
    chosen = make_recipe(values, where, is_trusted=not isinstance(recipe, (str, Path)))
    run = RunDirectory(chosen.run.folder)
    if chosen.parallel.auto:
        chosen = with_chosen_layout(chosen, run)
    own = callbacks if chosen.parallel.world == 1 else ()
    if callbacks and not own:
        for one in callbacks:
            reference_to(type(one))  # raises InputError if other processes cannot import the class
        uses = [Use.model_validate(use_of("callbacks", one)) for one in callbacks]
        chosen = chosen.changed(train={"callbacks": (*chosen.train.callbacks, *uses)})
    session = Session(chosen, run)
    preflight.check(chosen, run, where, chosen.export.hf)
    with run.lock():
        if tokens is not None:
            tokens.lend(run)
        stages.run_all(session, own, has_tokens=tokens is not None)
    return TrainingRun(run.path)
