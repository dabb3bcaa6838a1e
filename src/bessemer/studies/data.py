"""Studies of data: packing, duplicates, quality against quantity, shares of a mixture."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from bessemer.recipe import Recipe
from bessemer.recipe.tokens import Packing
from bessemer.studies import text
from bessemer.studies.base import HELD_OUT, MAX_BYTES, Row, Rows, Variation, build, measured, scored, shape, trained
from bessemer.tokens.loader import Batch, PackedSplit
from bessemer.tokens.packing import pack

Text = npt.NDArray[np.uint8]


# --- Packing against padding ------------------------------------------------------------------------------------------


def _packed(recipe: Recipe, packing: Packing) -> Row:
    """Train on the paragraphs of the text, each a document of its own, arranged by tokens/packing.py."""
    stream = text.training_and_held_out(MAX_BYTES)[0]
    edges = np.flatnonzero((stream[:-1] == ord("\n")) & (stream[1:] == ord("\n"))) + 1
    starts = np.concatenate([[0], edges])
    sizes = np.diff(np.concatenate([starts, [len(stream)]]))
    sequences, length = shape(recipe)
    shard = SimpleNamespace(dtype=stream.dtype, tokens=stream, is_trained=None)
    split = SimpleNamespace(starts=np.array([0]), shards=[shard], num_tokens=len(stream))
    source = PackedSplit(cast(Any, split), pack(starts, sizes, length, packing), text.END_OF_TEXT)
    order, filled = np.random.default_rng(0).permutation(len(source)), list[float]()

    def read(step: int) -> Batch:
        rows = source.rows(order[np.arange(step * sequences, (step + 1) * sequences) % len(source)])
        filled.append(float((rows.targets >= 0).mean()))
        none = np.zeros(sequences, dtype=np.int64)
        return Batch(step * sequences, rows.inputs.astype(np.int64), rows.targets, none, rows.starts, rows.real_lengths)

    row, share = trained(recipe, read), sum(filled) / max(len(filled), 1)
    positions = row["steps"] * sequences * length
    return {**row, "real_share": share, "text_bytes": round(share * positions),
            "tokens_per_second": share * row["tokens_per_second"]}  # fmt: skip


def _packing(rows: Rows) -> list[str]:
    padded, packed = rows["padded"], rows["packed"]
    better = packed["bits_per_byte"] < padded["bits_per_byte"]
    return [
        f"One document a sequence leaves {1 - padded['real_share']:.0%} of the positions without a target; packed, "
        f"{1 - packed['real_share']:.1%}.",
        f"So the same steps read {packed['text_bytes'] / padded['text_bytes']:.2f} times the text, and a second of CPU time "
        f"{packed['tokens_per_second'] / padded['tokens_per_second']:.2f} times as many real tokens.",
        f"After the same steps the packed model has {packed['bits_per_byte']:.3f} bits a byte and the padded one "
        f"{padded['bits_per_byte']:.3f}: {'what it read more shows' if better else 'reading more did not help here'}.",
    ]


packing = Variation(
    expected="Packed sequences waste next to nothing and lose nothing where attention stays within a document (Krell et al. "
    "2021; best fit: Ding et al. 2024).",
    variants={"padded": {"packing": "document"}, "packed": {"packing": "best-fit"}},
    conclude=_packing, base={"tokens.sequence_length": 128, "train.global_batch_tokens": 16 * 128}, tokens=600_000, train=_packed,
    plot_of="text_bytes", measures=("real_share", "text_bytes", "tokens_per_second", "bits_per_byte"),
)  # fmt: skip


# --- Duplicates -------------------------------------------------------------------------------------------------------

PASSAGES, PASSAGE, PROMPT = 16, 128, 64  # passages, bytes of each, and those that the model is given


def _with_duplicates(recipe: Recipe, copies: int) -> Row:
    """Train on a small text that holds some passages `copies` times. How well the model knows them, and others like them."""
    stream, other = text.training_and_held_out(MAX_BYTES)
    places = np.linspace(0, len(other) - PASSAGE - 1, 2 * PASSAGES).astype(np.int64)
    passages = [other[place : place + PASSAGE] for place in places]
    pieces = np.array_split(stream[:300_000], PASSAGES * copies)
    mixed = np.concatenate([part for n, piece in enumerate(pieces) for part in (piece, passages[2 * (n % PASSAGES)])])
    trainer = build(recipe)
    row = measured(recipe, text.sampler(mixed, *shape(recipe)), trainer)
    windows = {name: [text.spread(name, one, 1, PASSAGE - 1) for one in passages[begin::2]]
               for name, begin in (("repeated", 0), ("unseen", 1))}  # fmt: skip
    bits = {name: scored(trainer, *parts).bits_per_byte for name, parts in windows.items()}
    with torch.no_grad():  # the likeliest next byte, again and again, is the passage until the first wrong one
        tokens = torch.from_numpy(np.stack(passages[::2]).astype(np.int64))
        right = trainer.model.logits(tokens[:, :-1]).argmax(dim=-1)[:, PROMPT - 1 :] == tokens[:, PROMPT:]
    recalled = right.long().cumprod(dim=1).double().mean()
    return {**row, "bits_per_byte": scored(trainer).bits_per_byte, "recalled": float(recalled),
            "repeated_bits": bits["repeated"], "unseen_bits": bits["unseen"]}  # fmt: skip


def _duplicates(rows: Rows) -> list[str]:
    (few, once), *_, (many, most) = rows.items()
    worse = most["bits_per_byte"] - once["bits_per_byte"]
    return [
        f"Passages that the text holds {many} cost the model {most['repeated_bits']:.2f} bits a byte and others like them "
        f"{most['unseen_bits']:.2f}; deduplicated, {once['repeated_bits']:.2f} and {once['unseen_bits']:.2f}.",
        f"From the first {PROMPT} bytes it continues {most['recalled']:.1%} of the rest without an error, "
        f"{once['recalled']:.1%} where it read them {few}: "
        f"{'that is memorised' if most['recalled'] > 2 * once['recalled'] else 'too little to be memorised'}.",
        f"The copies take the place of other text: held-out text is {abs(worse):.3f} bits a byte "
        f"{'worse' if worse > 0 else 'better' if worse < 0 else 'the same'} for it.",
    ]


duplicates = Variation(
    expected="What is repeated is memorised, the more the more often (Carlini et al. 2022); deduplicated, a model recites a "
    "tenth as much (Lee et al. 2022).",
    variants={name: {"copies": n} for name, n in (("once", 1), ("8 times", 8), ("32 times", 32), ("128 times", 128))},
    conclude=_duplicates, base={"tokens.sequence_length": PASSAGE, "train.global_batch_tokens": 8 * PASSAGE}, tokens=1_200_000,
    train=_with_duplicates, plot_of="recalled",
    measures=("loss", "repeated_bits", "unseen_bits", "recalled", "bits_per_byte"),
)  # fmt: skip


# --- Quality against quantity -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _damaged(count: int) -> Text:
    """The last `count` bytes of the training text, the bytes of each line shuffled."""
    draw = np.random.default_rng(0)
    lines = bytes(text.training_and_held_out(MAX_BYTES)[0][-count:]).split(b"\n")
    shuffled = b"\n".join(draw.permutation(np.frombuffer(line, dtype=np.uint8).copy()).tobytes() for line in lines)
    return np.frombuffer(shuffled, dtype=np.uint8)


def _of_quality(recipe: Recipe, clean: int, bad: int = 0) -> Row:
    mixed = text.training_and_held_out(MAX_BYTES)[0][:clean]
    if bad:
        mixed = np.concatenate([mixed, _damaged(800_000)[:bad]])
    return {**trained(recipe, text.sampler(mixed, *shape(recipe))), "text_bytes": len(mixed)}


def _quality(rows: Rows) -> list[str]:
    bits = {name: row["bits_per_byte"] for name, row in rows.items()}
    few, tiny, half, more = bits["200k clean"], bits["25k clean"], bits["200k + 200k bad"], bits["200k + 800k bad"]
    return [
        f"On 200k bytes of clean text the model reaches {few:.3f} bits a byte; as many bad bytes added make it {half:.3f}, "
        f"four times as many {more:.3f}: {'more text is not better text' if few < half else 'bad text did no harm'}.",
        f"A filter that keeps only 25k of the clean bytes has {tiny:.3f}, which is {'worse' if tiny > half else 'better'} "
        f"than to keep the bad half and {'worse' if tiny > more else 'better'} than to keep four fifths that are bad.",
        f"Twice the clean text, 400k bytes, gives {bits['400k clean']:.3f} for the same training: "
        f"{abs(few - bits['400k clean']):.3f} "
        f"bits a byte {'better' if bits['400k clean'] < few else 'worse'} than to repeat half of it twice as often.",
    ]  # fmt: skip


quality = Variation(
    expected="A few repetitions of clean text cost little, many a lot (Muennighoff et al. 2023: up to four epochs); how hard "
    "to filter depends on the budget (Goyal et al. 2024, scaling laws for data filtering).",
    variants={
        "25k clean": {"clean": 25_000}, "200k clean": {"clean": 200_000}, "400k clean": {"clean": 400_000},
        "200k + 200k bad": {"clean": 200_000, "bad": 200_000}, "200k + 800k bad": {"clean": 200_000, "bad": 800_000},
    },
    conclude=_quality, tokens=1_000_000, train=_of_quality, plot_of="bits_per_byte",
    measures=("text_bytes", "loss", "bits_per_byte"),
)  # fmt: skip


# --- Shares of a mixture ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _prose() -> tuple[Text, Text]:
    """The language reference that Python's `help` shows, some 600 kB; the last tenth is held out."""
    from pydoc_data.topics import topics

    prose = np.frombuffer("\n\n".join(topics.values()).encode(), dtype=np.uint8)
    return prose[: len(prose) * 9 // 10], prose[len(prose) * 9 // 10 :]


def _mixed(recipe: Recipe, python: float) -> Row:
    """Train on batches of which this share of sequences is Python, the rest prose."""
    (sequences, length), trainer = shape(recipe), build(recipe)
    count = round(python * sequences)
    code = text.sampler(text.training_and_held_out(MAX_BYTES)[0], sequences, length)
    prose = text.sampler(_prose()[0], sequences, length)

    def read(step: int) -> Batch:
        first, second = code(step), prose(step)
        is_code = np.arange(sequences)[:, None] < count
        return replace(first, inputs=np.where(is_code, first.inputs, second.inputs),
                       targets=np.where(is_code, first.targets, second.targets))  # fmt: skip

    row, held = measured(recipe, read, trainer), text.spread("prose", _prose()[1], HELD_OUT, length)
    bits = {
        "python_bits": scored(trainer).bits_per_byte or 0.0,
        "prose_bits": scored(trainer, held).bits_per_byte or 0.0,
    }
    return {**row, **bits, "bits_per_byte": sum(bits.values()) / 2}


def _mixture(rows: Rows) -> list[str]:
    best = min(rows, key=lambda name: float(rows[name]["bits_per_byte"]))
    names = list(rows)
    python = [rows[name]["python_bits"] for name in names]
    first, last = python[0] - python[1], python[-2] - python[-1]
    rising = all(a > b - 0.01 for a, b in pairwise(python))
    return [
        f"The mean of both is lowest with {best} Python: {rows[best]['bits_per_byte']:.3f} bits a byte.",
        f"Python's own loss {'never rises' if rising else 'rises somewhere'} with its share (by 0.01 or more); the first "
        f"{names[1]} take {first:.3f} bits a byte off it, the last {last:.3f}: "
        f"{'little of a kind goes a long way' if first > last else 'all count alike'}.",
        f"Without any Python the model has {python[0]:.2f} bits a byte on it, trained on nothing else {python[-1]:.2f}; for "
        f"prose it is {rows[names[-1]]['prose_bits']:.2f} and {rows[names[0]]['prose_bits']:.2f}.",
    ]


mixture = Variation(
    expected="Each source's loss falls with its share, ever more slowly, so that the best mean lies between the ends (Ye et "
    "al. 2024, data mixing laws).",
    variants={f"{share:.0%}": {"python": share} for share in (0.0, 0.25, 0.5, 0.75, 1.0)},
    conclude=_mixture, tokens=600_000, train=_mixed, plot_of="bits_per_byte",
    measures=("python_bits", "prose_bits", "bits_per_byte"),
)  # fmt: skip
