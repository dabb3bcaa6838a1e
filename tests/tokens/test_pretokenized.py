from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.recipe import TokenSource
from bessemer.tokens import pretokenized

END = 0
DOCUMENTS = [[5, 6, 7], [8], list(range(1, 60)), [9, 9, 9, 9]]


def nanogpt(
    path: Path, ids: list[int], header: bool = False, dtype: str = "<u2", head: tuple[int, ...] = (20240520, 1)
) -> Path:
    """head: magic and version, and what follows the number of tokens."""
    raw = np.array(ids, dtype=dtype).tobytes()
    if header:
        values = [*head[:2], len(ids), *head[2:]]
        raw = np.array(values + [0] * (256 - len(values)), dtype="<i4").tobytes() + raw
    path.write_bytes(raw)
    return path


def megatron(path: Path, documents: list[list[list[int]]], dtype: str = "<u2", code: int = 8) -> Path:
    """A pair as Megatron-LM's builder writes it: documents of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    path.write_bytes(b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences))
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    places = np.concatenate([[0], np.cumsum(lengths.astype("<i8") * np.dtype(dtype).itemsize)[:-1]]).astype("<i8")
    borders = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + places.tobytes() + borders.tobytes())
    return path


def source(folder: Path, dtype: str | None = None, form: str = "nanogpt") -> TokenSource:
    return TokenSource(name="theirs", format=form, paths=(str(folder),), dtype=dtype)


def read(
    folder: Path, vocabulary: int = 100, dtype: str | None = None, end: int = END, form: str = "nanogpt"
) -> list[list[int]]:
    return [ids.tolist() for _, ids in pretokenized.documents(source(folder, dtype, form), vocabulary, end)]


CLOSED = [[*document, END] for document in DOCUMENTS]


@pytest.mark.parametrize("header", [False, True])
def test_nanogpt(tmp_path: Path, header: bool) -> None:
    flat = [token for document in DOCUMENTS for token in (*document, END)]
    nanogpt(tmp_path / "a.bin", flat, header)
    assert read(tmp_path) == CLOSED
    # end-of-text before each document, none after the last, some empty ones
    nanogpt(tmp_path / "a.bin", [END, END, *flat[:-1]], header)
    assert read(tmp_path) == CLOSED


def many(vocabulary: int, end: int, documents: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(vocabulary)
    texts = (draw.integers(0, vocabulary, 30) for _ in range(documents))
    return [[int(token) for token in text if token != end] + [end] for text in texts]


@pytest.mark.parametrize("end", [0, 98])
@pytest.mark.parametrize("vocabulary", [100, 65_536, 70_001])
@pytest.mark.parametrize(
    ("dtype", "header"),
    [
        *(("<u2", None), ("<u4", None), ("<i8", None), ("<u2", (1, 1))),
        *(("<u2", (20240520, 1)), ("<u4", (20240801, 7)), ("<u4", (20240520, 2)), ("<u4", (278895051, 1, 4))),
    ],
)
def test_the_width_of_ids_is_the_header_s_or_the_vocabulary_s(
    tmp_path: Path, dtype: str, header: tuple[int, ...] | None, vocabulary: int, end: int
) -> None:
    narrow = dtype == "<u2" and vocabulary > 65_536  # their ids are below 65,536, as those of a smaller tokenizer
    documents = many(65_536 if narrow else vocabulary, end)
    flat = [token for document in documents for token in document]
    nanogpt(tmp_path / "a.bin", flat, header is not None, dtype, header or ())
    if header is None and np.dtype(dtype).itemsize != (2 if vocabulary <= 65_536 else 4):
        with pytest.raises(InputError, match=r"tokens\.sources\.theirs\.dtype"):
            read(tmp_path, vocabulary, end=end)
    else:
        assert read(tmp_path, vocabulary, end=end) == documents
    named = {"<u2": "uint16", "<u4": "uint32", "<i8": "int64"}[dtype]
    assert read(tmp_path, vocabulary, named, end) == documents


def test_documents_over_the_borders_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [token for document in DOCUMENTS for token in (*document, END)]
    nanogpt(tmp_path / "a.bin", flat)
    for chunk in range(2, 9):
        monkeypatch.setattr(pretokenized, "CHUNK_TOKENS", chunk)
        assert read(tmp_path) == CLOSED


@pytest.mark.parametrize(
    ("ids", "settings", "cut", "why"),
    [
        ([1, 2, 3, END], {}, 1, r"a\.bin: 7 bytes are no whole number of ids"),
        ([1, 2, 3], {}, 0, r"a\.bin: no end-of-text token \(id 0\)"),
        ([1, 2, (1 << 32) + 3, END], {"dtype": "<i8"}, 0, f"id {(1 << 32) + 3}"),
        ([1, 2, 100, END], {}, 0, r"a\.bin: document 0 has the id 100, but the tokenizer has only 100"),
        ([1, 2, 3, END], {"header": True}, 2, r"a\.bin: its header says"),
        ([1, 2, 3, END], {"header": True, "dtype": "<u4", "head": (20240801, 7)}, 8, r"a\.bin: its header says"),
        ([], {}, 0, r"a\.bin: 0 bytes"),
    ],
)
def test_damaged_files_are_refused(
    ids: list[int], settings: dict[str, Any], cut: int, why: str, tmp_path: Path
) -> None:
    path = nanogpt(tmp_path / "a.bin", ids, **settings)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with pytest.raises(InputError, match=why):
        read(tmp_path, dtype="int64" if settings.get("dtype") == "<i8" else None)
    path.unlink()
    with pytest.raises(InputError, match=r"tokens.sources.theirs: .*no folder with .bin files"):
        read(tmp_path)


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
def test_megatron(tmp_path: Path, dtype: str, code: int) -> None:
    first, second, third, fourth = DOCUMENTS
    parts = [[first[:1], [], [*first[1:], END]], [second], [], [[]], [third, [END]], [fourth]]
    megatron(tmp_path / "a.bin", parts, dtype, code)
    assert read(tmp_path, form="megatron") == CLOSED
    before = pretokenized.facts(source(tmp_path, form="megatron"), by_content=True)
    megatron(tmp_path / "a.bin", [[sequence] for part in parts for sequence in part], dtype, code)
    assert pretokenized.facts(source(tmp_path, form="megatron"), by_content=True) != before, (
        "the same ids, other documents"
    )


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[document] for document in DOCUMENTS])
    index = path.with_suffix(".idx")
    good = index.read_bytes()
    lengths, places, borders = 34, 34 + 16, 34 + 16 + 32

    def patched(place: int, raw: bytes) -> bytes:
        return good[:place] + raw + good[place + len(raw) :]

    for damaged, why in [
        (patched(0, b"X"), "not a whole one of version 1"),
        (patched(9, b"\x02"), "not a whole one of version 1"),
        (patched(17, b"\x07"), "integer ids"),
        (patched(18, struct.pack("<Q", 1 << 60)), "not a whole one"),
        *((good[:length], "not a whole one") for length in range(len(good))),
        (patched(lengths, struct.pack("<i", -1)), "not within the"),
        (patched(lengths + 12, struct.pack("<i", 999)), "not within the"),
        (patched(places + 8, struct.pack("<q", 7)), "not within the"),
        (patched(places + 8, struct.pack("<q", (1 << 63) - 2)), "not within the"),
        (patched(borders, struct.pack("<q", 1)), "do not run from 0"),
        (patched(borders + 8, struct.pack("<q", 3)), "do not run from 0"),
        (patched(borders + 32, struct.pack("<q", 3)), "do not run from 0"),
    ]:
        index.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"a\.idx: damaged index: .*{why}"):
            read(tmp_path, form="megatron")
    index.unlink()
    with pytest.raises(InputError, match=r"a\.idx: no such file"):
        read(tmp_path, form="megatron")
    megatron(path, [[[1, -2, 3]]], "<i4", 4)
    with pytest.raises(InputError, match=r"a\.bin: .* has the id -2"):
        read(tmp_path, form="megatron")
