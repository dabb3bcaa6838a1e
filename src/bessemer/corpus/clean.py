"""Units to clean, judged records with their MinHash signatures: the heavy pass over all text, on Daft.

Text streams through: a unit is read, its records are normalised and judged, and the rows go to Parquet files
parted by source and by the first bits of the identity. No process ever holds more than a few units.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import engine
from bessemer.corpus.document import EXCERPT_CHARACTERS, Record, identity
from bessemer.corpus.extract import NotText, fold, normalise
from bessemer.corpus.readers import read
from bessemer.corpus.rules import judge
from bessemer.corpus.units import Unit
from bessemer.recipe import Corpus, Extract, Rules

if TYPE_CHECKING:
    import pyarrow as pa

BUCKET_BYTES = 128 << 20
"""Input bytes whose documents are sorted in memory at one time."""

ROW_GROUP_BYTES = 1 << 20
"""Bytes the engine gathers per bucket before it writes them out; its default of 128 MB would hold every
bucket in memory to the end."""

UNITS_AT_ONCE = 1
"""Units in a batch of the engine: a unit is already sized to be one."""


@dataclass
class Meter:
    """Bytes read so far in this process, for the progress bar."""

    num_bytes: int = 0


METER = Meter()


@dataclass
class Rows:
    """Columns of judged records, as they grow."""

    identity: list[str] = field(default_factory=list)
    bucket: list[int] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    """The clean text; of a rejected record only the beginning."""
    reason: list[str | None] = field(default_factory=list)
    detail: list[str] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    """What is compared for near duplicates; "" when it is not compared. Not null: the engine writes the null
    signature that follows as an empty list, which no Parquet reader takes for a list of fixed size."""
    exact: list[bytes | None] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    counted: list[int | None] = field(default_factory=list)
    """None for a document. A unit ends with a receipt: a row that says how many documents it gave, so that
    rows lost or doubled on the way are noticed."""


COLUMN_NAMES = tuple(Rows.__dataclass_fields__)


def clean(units: list[Unit], corpus: Corpus, buckets: dict[str, int], folder: Path) -> None:
    """Read, judge and sign all units into `folder`/source=NAME/bucket=N/*.parquet."""
    daft = engine.quiet_daft()
    from daft import DataType, Series, col

    strings = ("identity", "path", "metadata", "label", "text", "reason", "detail", "folded")
    numbers = ("bucket", "num_bytes", "characters", "words", "counted")
    types = {name: DataType.string() for name in strings} | {name: DataType.int64() for name in numbers}
    types["exact"] = DataType.binary()
    rules, settings, minhash = corpus.rules, corpus.extract, corpus.dedup.minhash

    def judge_units(batch: Series) -> pa.Array:
        with engine.CALLS:
            given = [Unit.from_json(text) for text in batch.to_pylist()]
            return _as_lists([_judged(unit, rules, settings, buckets, minhash) for unit in given])

    judged = daft.func.batch(
        return_dtype=DataType.list(DataType.struct({name: types[name] for name in COLUMN_NAMES})),
        batch_size=UNITS_AT_ONCE,
        use_process=False,
    )(judge_units)
    frame = daft.from_pydict({"source": [unit.source for unit in units], "unit": [unit.to_json() for unit in units]})
    frame = frame.select(col("source"), judged(col("unit")).alias("row")).explode("row")
    frame = frame.select(col("source"), *[col("row").get(name).alias(name) for name in COLUMN_NAMES])
    if minhash:
        signature = col("folded").minhash(
            num_hashes=corpus.dedup.bands * corpus.dedup.rows,
            ngram_size=corpus.dedup.shingle_words,
            hash_function="xxhash3_64",
        )
        frame = frame.with_column("signature", signature)
    with daft.execution_config_ctx(parquet_target_row_group_size=ROW_GROUP_BYTES):
        frame.exclude("folded").write_parquet(
            str(folder), compression="zstd", write_mode="overwrite", partition_cols=["source", "bucket"]
        )


def bucket_of(identity_: str, num_buckets: int) -> int:
    """Which bucket an identity falls into; buckets in order hold identities in order."""
    return int(identity_[:8], 16) * num_buckets >> 32


def num_buckets(num_bytes: int) -> int:
    """Buckets for a source of so many bytes."""
    return min(max(-(-num_bytes // BUCKET_BYTES), 1), 4096)


def _judged(unit: Unit, rules: Rules, settings: Extract, buckets: dict[str, int], minhash: bool) -> Rows:
    rows = Rows()
    for piece, record in read(unit, rules, settings):
        if engine.STOP.is_set():
            break  # not an exception: the engine would log one; whoever stopped drops what comes out
        _clean_record(record, rules)
        _append(rows, unit, piece.name, record, buckets[unit.source], minhash)
    num_records = len(rows.identity)
    receipt = Record(f"unit {unit.number}", 0, metadata={"unit": unit.number})
    _append(rows, unit, "", receipt, buckets[unit.source], minhash=False)
    rows.counted[-1] = num_records
    METER.num_bytes += unit.size
    return rows


def _clean_record(record: Record, rules: Rules) -> None:
    """Normalise and judge in place."""
    if record.reason is not None:
        record.text = record.text[:EXCERPT_CHARACTERS]
    elif len(record.text) > 4 * rules.max_characters:
        # Normalising what is far too long would only cost time.
        record.reason, record.detail = "too_long", f"{len(record.text)} characters"
    else:
        try:
            record.text.encode()
            record.text = normalise(record.text)
            record.reason, record.detail = judge(record.text, rules) or (None, "")
        except UnicodeEncodeError as error:
            record.reason, record.detail = "not_utf8", f"half of a surrogate pair at character {error.start}"
        except NotText as error:
            record.reason, record.detail = "not_text", str(error)


def _append(rows: Rows, unit: Unit, name: str, record: Record, num_buckets_: int, minhash: bool) -> None:
    key = identity(unit.source, name, record.key)
    folded = fold(record.text) if record.reason is None else None
    text = record.text if record.reason is None else record.text[:EXCERPT_CHARACTERS]
    rows.identity.append(key)
    rows.bucket.append(bucket_of(key, num_buckets_))
    rows.path.append(_printable(name))
    rows.metadata.append(json.dumps(record.metadata, sort_keys=True))
    rows.label.append(_printable(record.label))
    rows.text.append(_printable(text) if record.reason else text)
    rows.reason.append(record.reason)
    rows.detail.append(_printable(record.detail))
    rows.num_bytes.append(record.num_bytes)
    rows.characters.append(len(record.text))
    rows.folded.append(folded if minhash and folded is not None else "")
    rows.exact.append(hashlib.blake2b(folded.encode(), digest_size=16).digest() if folded is not None else None)
    rows.words.append(folded.count(" ") + 1 if folded else 0)
    rows.counted.append(None)


def _printable(text: str) -> str:
    """Without what UTF-8 cannot hold: file names and JSON may carry lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def _as_lists(batches: list[Rows]) -> Any:
    """One list of structs per unit, as Arrow: columns go over as a whole, not value by value."""
    import pyarrow as pa

    types = dict.fromkeys(("bucket", "num_bytes", "characters", "words", "counted"), pa.int64())
    types["exact"] = pa.large_binary()
    arrays = [
        pa.array([value for rows in batches for value in getattr(rows, name)], types.get(name, pa.large_string()))
        for name in COLUMN_NAMES
    ]
    offsets = [0]
    for rows in batches:
        offsets.append(offsets[-1] + len(rows.identity))
    structs = pa.StructArray.from_arrays(arrays, names=list(COLUMN_NAMES))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), structs)
