"""The tokenizer that a recipe chooses: its file, special tokens, framing, and settings that go with a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bessemer.recipe import Recipe
from bessemer.storage import hub
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer, chat, files
from bessemer.tokens.tokenizer.description import Framing
from bessemer.tokens.tokenizer.patterns import NORMALIZERS, pattern_of


def mask_token(recipe: Recipe) -> str | None:
    """Return the mask token that a recipe's tokenizer must have; None unless the model predicts hidden tokens."""
    return recipe.tokenizer.mask_token if recipe.predicts_hidden else None


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """Load the tokenizer at the recipe's tokenizer.path; with model.from, add tokenizer.special_tokens to it."""
    options, file, mask = recipe.tokenizer, files.tokenizer_file(str(recipe.tokenizer.path)), mask_token(recipe)
    if recipe.adds_tokens:
        return Tokenizer.load_any(file).with_special_tokens(options.special_tokens, options.end_of_text, mask)
    return Tokenizer.load(file, options.end_of_text, mask)


def train_tokenizer(recipe: Recipe, texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer with the settings of the recipe's [tokenizer]."""
    options = recipe.tokenizer
    special = [*options.special_tokens, *(chat.CHATML_TOKENS if recipe.chat_parts else ())]
    regex, form = pattern_of(options.pattern, options.digits, options.white_space), NORMALIZERS.get(options.pattern)
    end, mask = options.end_of_text, mask_token(recipe)
    return Tokenizer.train(texts, vocabulary, end, mask, special, regex, options.prefix_space, form)


def keeps_tokenizer(recipe: Recipe) -> bool:
    """Return True if a run starts from trained weights and keeps their tokenizer."""
    return recipe.tokenizer.path is not None and recipe.is_continued


def framing_of(recipe: Recipe, tokenizer: Tokenizer) -> Framing | None:
    """Return the ids before and after each text that a model to start from expects, such as bos, or [CLS] and [SEP].

    The result is None, which means only end-of-text before each text, for a new model and for one that was trained like
    that. For a decoder it has no ids after the text, even if the model's tokenizer adds some.
    """
    if not keeps_tokenizer(recipe):
        return None
    kept = files.read_table(files.folder_of(str(recipe.tokenizer.path)) / "manifest.json").get("tokenizer")
    around, end = tokenizer.framing, tokenizer.end_of_text
    if kept is not None:  # a run of Bessemer
        around = Framing(tuple(kept.get("prefix") or ()), tuple(kept.get("suffix") or ()))
        if kept.get("prefix") is None:
            return None
    before, after = around.before, around.after
    if before == (end,):
        return None
    if recipe.train.objective != "classify" and not recipe.predicts_hidden:
        return Framing(before)
    if not before or not after:  # a decoder, or an encoder without special tokens around texts
        return None if set(files.USUAL["mask"]) & set(tokenizer.special.values()) else Framing(before)
    return Framing(before, (*(after[:-1] if after[-1] == end else after), end))


def manifest_facts(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the manifest's entries about the model that a run starts from; empty for a new model.

    They are the ids before and after each text (`prefix`, `suffix`), the ids that end generation (`ends`), the special
    tokens by role such as bos (`special`), and for each added token the ids that encoded its text before (`added`).
    """
    if not keeps_tokenizer(recipe):
        return {}
    folder, around = files.folder_of(str(recipe.tokenizer.path)), framing_of(recipe, tokenizer)
    folders = [folder, *_model_folders(recipe)]
    kept = files.read_table(folder / "manifest.json").get("tokenizer", {})
    ends = kept.get("ends") or next((named for one in folders if (named := files.end_ids(one, tokenizer))), [])
    facts: dict[str, Any] = {"special": files.special_tokens(tokenizer, folders)}
    facts["ends"] = list(dict.fromkeys([*ends, tokenizer.end_of_text]))
    if recipe.adds_tokens:
        before = Tokenizer.load_any(files.tokenizer_file(str(recipe.tokenizer.path)))
        new = [name for name in recipe.tokenizer.special_tokens if before.id_of(name) is None]
        facts["added"] = {str(tokenizer.id_of(name)): before.encode(name) for name in new}
    return facts | ({"prefix": list(around.before), "suffix": list(around.after)} if around is not None else {})


def _model_folders(recipe: Recipe) -> list[Path]:
    """Return a list with the folder of the model that model.from names; empty if the recipe does not set it."""
    return [hub.local_folder(recipe.model.from_, weights=False)] if recipe.model.from_ else []


def files_to_copy(recipe: Recipe) -> list[Path]:
    """Return the files of TOKENIZER_SIDE_FILES in the folder of the tokenizer, else of the model, that a run starts from.

    The result is empty for a new model.
    """
    if not keeps_tokenizer(recipe):
        return []
    folders = (files.folder_of(str(recipe.tokenizer.path)), *_model_folders(recipe))
    return next(filter(None, map(files.side_files, folders)), [])


def resolve_tokenizer(recipe: Recipe) -> Recipe:
    """Return the recipe with [tokenizer] completed from the tokenizer that it loads; unchanged if it trains one.

    Sets the path to model.from if the recipe sets neither path nor vocabulary, pins a hub model to its current commit, and
    sets end_of_text and mask_token if the recipe does not.
    """
    tokenizer = recipe.tokenizer
    path, changes = tokenizer.path, dict[str, Any]()
    if path is None and tokenizer.vocabulary is None:
        path = recipe.model.from_
    if path is None:
        return recipe
    if path.startswith("hf:") and hub.is_name(name := path.removeprefix("hf:")):
        path = f"hf:{hub.pinned(name, hub.fetch_model(name, weights=False))}"
    if path != tokenizer.path:
        changes["path"] = path
    wanted = {"end_of_text", *(["mask_token"] if recipe.predicts_hidden else [])} - tokenizer.model_fields_set
    if wanted:
        tokens = files.special_tokens(
            Tokenizer.load_any(files.tokenizer_file(path)), [files.folder_of(path), *_model_folders(recipe)]
        )
        names = {"end_of_text": files.end_of_text(tokens), "mask_token": tokens.get("mask")}
        changes |= {key: token for key, token in names.items() if key in wanted and token}
    return recipe.changed(tokenizer=changes)


def template_source(recipe: Recipe) -> str:
    """Return the chat template of the recipe, else of the tokenizer's folder, else ChatML, as Jinja text.

    Raises InputError if its file cannot be read.
    """
    named = recipe.tokens.chat_template
    if named not in (None, "chatml"):
        return chat.read_template(Path(str(named)), "tokens.chat_template")
    path = recipe.tokenizer.path if named is None else None
    own = None if path is None else chat.chat_template(files.folder_of(path))
    return chat.CHATML if own is None else own


def model_input(recipe: Recipe, store: TokenStore, prompt: str) -> tuple[str, Framing]:
    """Return a prompt as the text that the model continues, and the ids to put before and after it.

    In a run trained on conversations, the chat template renders the prompt as a user message, and no more ids are added.
    """
    if not recipe.chat_parts:
        return prompt, store.framing
    names = chat.template_names(store.folder, recipe.tokenizer.end_of_text)
    template, messages = chat.chat_template(store.folder) or chat.CHATML, [{"role": "user", "content": prompt}]
    return chat.render(template, names, messages, add_generation_prompt=True)[0], Framing()


def load_template(recipe: Recipe) -> chat.TemplateSource | None:
    """Return the chat template of a recipe; None if no source has conversations. Raises InputError if it cannot be read."""
    if not recipe.chat_parts:
        return None
    folder = next((path.parent for path in files_to_copy(recipe)), Path(os.devnull))
    names = chat.template_names(folder, recipe.tokenizer.end_of_text)
    return chat.TemplateSource(recipe.chat_parts, template_source(recipe), names)
