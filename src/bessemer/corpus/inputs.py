"""The inputs of a corpus as digests: files of the sources, keys of the recipe, and other files that its steps read.

The module imports no data libraries, because every training run uses it, even where they are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from bessemer.common.errors import FileChanged, InputError
from bessemer.common.extensions import find
from bessemer.common.hashing import digest, file_sha256
from bessemer.corpus.filters import language
from bessemer.corpus.readers.files import Listing, contents, earlier_files, listing
from bessemer.recipe import Corpus, Recipe, Source, without_folders
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_or_none, stage_facts
from bessemer.storage import filesystem

VERSION = 8  # increase when equal sources would give other documents, or the folder's layout changes
CONTENTS = "sources.json"  # in the corpus folder

Found = TypeVar("Found")
Contents: TypeAlias = "dict[str, list[list[Any]]]"  # source -> [name, size, hash] of each file


def inputs_digest(recipe: Recipe) -> str:
    """Return a digest of `[corpus]` and of the path, size and modification time of every input file.

    It leaves out keys that do not affect the documents, such as the engine and the weights of sources.
    """
    return digest_of_files(recipe.corpus, listings_of(recipe.corpus))


def content_digest(recipe: Recipe) -> str:
    """Return a digest of `[corpus]` and the contents of the input files, which stays equal if they are moved or copied.

    Long files are hashed at three places (hashing.sampled_sha256).
    """
    return digest_of_contents(recipe, contents_of(listings_of(recipe.corpus)))


def contents_of(listings: dict[str, Listing]) -> Contents:
    """Return a dict from the name of each source to a list of [name, size, hash] of its files."""
    return {name: contents(files.read) for name, files in sorted(listings.items())}


def changed_files(recipe: Recipe, run: RunDirectory) -> dict[str, list[str]] | None:
    """Return the names of files that changed since the corpus was built, under the keys "missing", "changed" and "added".

    Returns None if another input changed, or if the corpus has no list of files.
    """
    built = read_json_or_none(run.corpus / CONTENTS)
    if built is None or digest_of_contents(recipe, built) != stage_facts(run.corpus).get("content"):
        return None
    before, now = (
        {(source, name): (size, hashed) for source, rows in files.items() for name, size, hashed in rows}
        for files in (built, contents_of(listings_of(recipe.corpus)))
    )
    changed = {key for key in before.keys() & now.keys() if before[key] != now[key]}
    names = {"missing": before.keys() - now.keys(), "changed": changed, "added": now.keys() - before.keys()}
    return {word: sorted(name for _, name in keys) for word, keys in names.items()}


def digest_of_contents(recipe: Recipe, files: Contents) -> str:
    """Return the value of `content_digest` when `files`, the result of `contents_of`, is already known."""
    return digest(_settings(without_folders(recipe).corpus), f"corpus {VERSION}", files, *_other_inputs(recipe.corpus))


def digest_of_files(corpus: Corpus, listings: dict[str, Listing]) -> str:
    """Return the value of `inputs_digest` from listings already made: of each source by its name, the files to read."""
    facts = attrgetter("path", "size", "mtime_ns", "etag")
    files = {name: [facts(file) for file in listing.read] for name, listing in listings.items()}
    return digest(_settings(corpus), f"corpus {VERSION}", files, *_other_inputs(corpus))


def _settings(corpus: Corpus) -> dict[str, Any]:
    """Return the keys of `[corpus]` that affect the documents, with their values."""
    how_it_runs = dict.fromkeys(("engine", "address", "slurm", "workers", "storage"), True)
    return corpus.model_dump(mode="json", exclude={"sources": {"__all__": {"weight", "max_epochs"}}, **how_it_runs})


def _other_inputs(corpus: Corpus) -> list[Any]:
    """Return digests of all inputs except sources: models, evaluation sets, code of extensions, earlier corpora."""
    facts: list[Any] = [_content(Path(path)) for path in corpus.rules.files()]
    facts += [find("filters", one.use).digest for one in corpus.filters]
    readers = (find("readers", source.format) for source in corpus.sources if source.format is not None)
    facts += [reader.digest for reader in readers if not reader.is_built_in]
    facts += [find("global_steps", one.use).digest for one in corpus.steps]
    if corpus.language.identify:
        facts.append(_content(language.model_path(corpus.language.model)))
    facts += [_content(Path(one.path).expanduser()) for one in corpus.contamination.sets]
    if corpus.quality.on:
        from bessemer.corpus.filters.quality import classify

        facts.append(classify.inputs(corpus.quality, [source.name for source in corpus.sources]))
    for folder in corpus.dedup.against:
        facts.append([(path.name, filesystem.version(path)[0]) for path in earlier_files(folder)])
    return facts


def _content(path: Path) -> list[str]:
    """Return the SHA-256 of a file, or of each file in a folder; [] for a missing file, whose reading later raises an error."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file_sha256(file) for file in files if file.is_file()]


def of_each_source(corpus: Corpus, find: Callable[[Source], Found]) -> dict[str, Found]:
    """Apply `find` to each source and return the results by name. Raises one InputError with the problems of all sources."""
    results, problems = dict[str, Found](), list[str]()
    for source in corpus.sources:
        try:
            results[source.name] = find(source)
        except FileChanged:
            raise
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
    return results


def listings_of(corpus: Corpus) -> dict[str, Listing]:
    """Return the files of each source by the source's name. Raises InputError if a source has a wrong path or no files."""
    return of_each_source(corpus, listing)
