"""What a corpus is made from: the files of its sources, the keys of its recipe and all else that its steps read, as digests.

Light: it is asked before every training, also where the data libraries are not installed.
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
from bessemer.recipe import Contamination, Corpus, Recipe, Source, without_folders
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_or_none, stage_facts
from bessemer.storage.path import file_size

VERSION = 8  # increased when the same sources would give other documents, or the folder another layout
CONTENTS = "sources.json"  # of the corpus folder

Found = TypeVar("Found")
Contents: TypeAlias = "dict[str, list[list[Any]]]"  # name, size and hash of files, by source


def inputs_digest(recipe: Recipe) -> str:
    """Digest of [corpus] and of path, size and time of every input file; without weights and max_epochs, which only mix
    the documents later, and without the engine."""
    return digest_of_files(recipe.corpus, listings_of(recipe.corpus))


def content_digest(recipe: Recipe) -> str:
    """As `inputs_digest`, of what the files hold in place of where they lie and of their time: by it a corpus is known again
    whose sources were copied, moved or touched. Long files are compared at three places (hashing.sampled_sha256)."""
    return digest_of_contents(recipe, contents_of(listings_of(recipe.corpus)))


def contents_of(listings: dict[str, Listing]) -> Contents:
    """Name, size and hash of every input file, by source."""
    return {name: contents(files.read) for name, files in sorted(listings.items())}


def changed_files(recipe: Recipe, run: RunDirectory) -> dict[str, list[str]] | None:
    """The names of files that are missing, changed or added since the corpus was built, by these words; None where something else
    has changed, or where it was not kept which files there were."""
    built = read_json_or_none(run.corpus / CONTENTS)
    if built is None or digest_of_contents(recipe, built) != stage_facts(run.corpus).get("content"):
        return None
    before, now = (
        {(source, name): (size, hashed) for source, rows in files.items() for name, size, hashed in rows}
        for files in (built, contents_of(listings_of(recipe.corpus)))
    )
    changed = {key for key in before.keys() & now.keys() if before[key] != now[key]}
    found = {"missing": before.keys() - now.keys(), "changed": changed, "added": now.keys() - before.keys()}
    return {word: sorted(name for _, name in keys) for word, keys in found.items()}


def digest_of_contents(recipe: Recipe, files: Contents) -> str:
    return digest(_settings(without_folders(recipe).corpus), f"corpus {VERSION}", files, *_other_inputs(recipe.corpus))


def digest_of_files(corpus: Corpus, listings: dict[str, Listing]) -> str:
    facts = attrgetter("path", "size", "mtime_ns", "etag")
    files = {name: [facts(file) for file in found.read] for name, found in listings.items()}
    return digest(_settings(corpus), f"corpus {VERSION}", files, *_other_inputs(corpus))


def _settings(corpus: Corpus) -> dict[str, Any]:
    """The keys of [corpus] on which the documents depend."""
    section = corpus.model_dump(mode="json", exclude={"sources": {"__all__": {"weight", "max_epochs"}}})
    for key in ("engine", "address", "slurm", "workers", "storage"):
        del section[key]
    for key in ("filters", "steps"):  # left out, so that a corpus of an earlier version stays current
        if not section[key]:
            del section[key]
    for source in section["sources"]:
        if not source["reader"]:
            del source["reader"]
    return section


def _other_inputs(corpus: Corpus) -> list[Any]:
    """What the steps read besides the sources: models, evaluation sets, earlier corpora."""
    found: list[Any] = [_content(Path(path)) for path in corpus.rules.files()]
    found += [find("filters", one.use).digest for one in corpus.filters]
    readers = (find("readers", source.format) for source in corpus.sources if source.format is not None)
    found += [reader.digest for reader in readers if not reader.is_built_in]
    found += [find("global_steps", one.use).digest for one in corpus.steps]
    if corpus.language.identify:
        found.append(_content(language.model_path(corpus.language.model)))
    if corpus.contamination.sets:
        found.append(set_hashes(corpus.contamination))
    if corpus.quality.on:
        from bessemer.corpus.filters.quality import classify

        found.append(classify.inputs(corpus.quality, [source.name for source in corpus.sources]))
    for folder in corpus.dedup.against:
        found.append([(path.name, file_size(path)) for path in earlier_files(folder)])
    return found


def set_hashes(settings: Contamination) -> list[str]:
    """SHA-256 of the file of each evaluation set. Raises InputError for a missing one."""
    hashes = []
    for evaluation_set in settings.sets:
        try:
            hashes.append(file_sha256(Path(evaluation_set.path).expanduser()))
        except OSError as error:
            where = f"corpus.contamination.sets.{evaluation_set.name}: {evaluation_set.path}"
            raise InputError(f"{where}: {error.strerror}") from None
    return hashes


def _content(path: Path) -> list[str]:
    """Hash of a file, or of each file in a folder; nothing where there is none, which is refused when it is read."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file_sha256(file) for file in files if file.is_file()]


def of_each_source(corpus: Corpus, find: Callable[[Source], Found]) -> dict[str, Found]:
    """Return what is found for each source, by name. Raises one InputError with what is wrong with any of them."""
    found, problems = dict[str, Found](), list[str]()
    for source in corpus.sources:
        try:
            found[source.name] = find(source)
        except FileChanged:
            raise
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
    return found


def listings_of(corpus: Corpus) -> dict[str, Listing]:
    """What the sources name. Raises InputError as `files.listing`."""
    return of_each_source(corpus, listing)
