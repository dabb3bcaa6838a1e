"""Tokenise documents from Python, without a recipe file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import tomli_w

from bessemer.common.errors import InputError
from bessemer.corpus.document import COLUMNS, identity
from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, write_json
from bessemer.run.stage import mark_stage, staging
from bessemer.storage.path import published_folder
from bessemer.tokens import build
from bessemer.tokens.documents import DOCUMENT_COLUMNS, StoredDocument, list_values
from bessemer.tokens.encode import batches
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer.choice import resolve_tokenizer


def tokenize(
    run: Path, documents: Iterable[str | StoredDocument] | None = None, *, tokenizer: str | Path | None = None,
    vocabulary: int | None = None, **settings: Any,
) -> TokenStore:  # fmt: skip
    """Write the documents of a run as token shards.

    Args:
        run: The run directory. Its documents are in `run/corpus`; the tokens come to `run/tokens`.
        documents: Texts or documents that replace `run/corpus` first. None: `run/corpus` stays as it is.
        tokenizer: A tokenizer.json, a folder that has one, or `hf:ORG/NAME`. None: train one on the documents.
        vocabulary: Number of ids of the tokenizer that is trained; by default 32,768.
        settings: Other keys of the recipe's [tokens], such as `held_out`, `shard_tokens` and `workers`.

    Returns:
        The tokens, opened.

    Raises:
        InputError: For documents, a tokenizer or settings that cannot be used, and for too little text.
    """
    directory = RunDirectory(run)
    if documents is not None:
        write_documents(directory.corpus, documents)
    corpus = published_folder(directory.corpus)
    if not (corpus / "documents").exists():
        raise InputError(f"{corpus}: no documents here; give some, or build them with `bessemer corpus RECIPE`")
    formats = {row["source"]: row["format"] for row in read_json(directory.corpus / "statistics.json")["sources"]}
    sources = [
        {"name": name, "format": "chat" if formats.get(name) == "chat" else "text", "paths": [str(corpus)]}
        for name in list_values(corpus / "documents", "source")
    ]
    chosen = {"vocabulary": vocabulary, "path": None if tokenizer is None else str(tokenizer)}
    values = {
        "run": {"name": directory.path.absolute().name, "dir": str(directory.path.absolute().parent)},
        "corpus": {"sources": sources},
        "tokenizer": {key: value for key, value in chosen.items() if value is not None},
        "tokens": settings,
    }
    return build.build(resolve_tokenizer(parse(tomli_w.dumps(values), "tokenize")), directory)


def write_documents(corpus: Path, documents: Iterable[str | StoredDocument]) -> None:
    """Write documents, in their order, as the corpus of a run. A text is a document of the source `text`."""
    import pyarrow as pa

    from bessemer.corpus.publish import ROW_GROUP_BYTES, PartWriter, schema

    totals, content = {"documents_kept": 0, "bytes_kept": 0}, hashlib.sha256()
    with staging(corpus) as folder:
        writer = PartWriter(folder / "documents", COLUMNS)
        for batch in batches(map(_stored, count(), documents), ROW_GROUP_BYTES):
            rows = [[getattr(one, name) for name in DOCUMENT_COLUMNS] for one in batch]
            values = [dict.fromkeys(COLUMNS, "") | dict(zip(DOCUMENT_COLUMNS, row, strict=True)) for row in rows]
            writer.write(pa.Table.from_pylist(values, schema(COLUMNS)))
            content.update(repr(rows).encode())
            totals["documents_kept"] += len(batch)
            totals["bytes_kept"] += sum(len(one.text.encode()) for one in batch)
        writer.close()
        if not totals["documents_kept"]:
            raise InputError("documents: there are none; give at least one")
        write_json(folder / "statistics.json", {"totals": totals, "sources": []})
        mark_stage(folder, content.hexdigest())


def _stored(number: int, document: str | StoredDocument) -> StoredDocument:
    if isinstance(document, str):
        document = StoredDocument(identity("text", "", str(number)), "text", document)
    if not isinstance(document, StoredDocument) or not document.text:
        raise InputError(f"documents: number {number} is no text or document, or it is empty: {document!r:.80}")
    return document
