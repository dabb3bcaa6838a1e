"""Who writes which piece, whether pieces make up the whole, and slices of the whole out of them."""

import itertools
import random

import pytest
import torch

from bessemer.checkpoint.format import ShardMetadata, StoredShard, StoredTensor, assemble, global_plan, require_cover
from bessemer.common.errors import BessemerError

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def cut(shape: tuple[int, ...], draw: random.Random) -> Boxes:
    """A tensor cut at random, again and again, into boxes that need not lie in a grid."""
    boxes: Boxes = [((0,) * len(shape), shape)]
    for _ in range(draw.randrange(8)):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        axis = draw.randrange(len(shape))
        if size[axis] < 2:
            boxes.append((offset, size))
            continue
        at = draw.randrange(1, size[axis])
        boxes.append((offset, (*size[:axis], at, *size[axis + 1 :])))
        boxes.append(((*offset[:axis], offset[axis] + at, *offset[axis + 1 :]), (*size[:axis], size[axis] - at, *size[axis + 1 :])))  # fmt: skip
    return boxes


def counted(shape: tuple[int, ...], boxes: Boxes) -> torch.Tensor:
    count = torch.zeros(shape, dtype=torch.int64)
    for offset, size in boxes:
        count[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))] += 1
    return count


def test_exact_covers_pass_and_others_do_not() -> None:
    draw = random.Random(0)
    wrong = 0
    for _ in range(300):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 4)))
        boxes = cut(shape, draw)
        require_cover("it", shape, boxes)
        if len(boxes) > 1 and draw.random() < 0.8:  # one is left out, stands twice, or moved onto another
            number = draw.randrange(len(boxes))
            others = boxes[:number] + boxes[number + 1 :]
            boxes = draw.choice([others, [*boxes, boxes[number]], [*others, draw.choice(others)]])
            assert not bool((counted(shape, boxes) == 1).all())
            wrong += 1
            with pytest.raises(BessemerError, match="it: its .* pieces (leave out a part|overlap)"):
                require_cover("it", shape, boxes)
    assert wrong > 100


def test_any_slice_comes_out_of_any_pieces() -> None:
    draw = random.Random(1)
    for _ in range(100):
        shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        whole = torch.randn(shape)
        sources = tuple(StoredShard(str(number), "x", *box) for number, box in enumerate(cut(shape, draw)))
        files = {
            source.file: whole[tuple(slice(a, a + n) for a, n in zip(source.offset, source.shape, strict=True))]
            for source in sources
        }
        stored = StoredTensor("torch.float32", shape, sources)
        offset = tuple(draw.randrange(n) for n in shape)
        size = tuple(draw.randrange(n - at + 1) for n, at in zip(shape, offset, strict=True))
        found = assemble(stored, offset, size, lambda source, there: files[source.file][there], torch.float32)  # noqa: B023
        assert torch.equal(found, whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))])


def described(
    dtype: str = "torch.float32", shape: tuple[int, ...] = (4, 100), offset: int = 0, rows: int = 4
) -> ShardMetadata:
    size = (rows, *shape[1:])
    return ShardMetadata(dtype, shape, (offset, 0), size, rows * shape[1] * 4)


def test_replicas_share_the_writing() -> None:
    names = [("model", f"w{number}") for number in range(12)]
    duties, contents = global_plan([dict.fromkeys(names, described()) for _ in range(4)])
    written = [duty["model"][1] for duty in duties]
    assert sorted(itertools.chain(*written)) == sorted(name for _, name in names)
    assert [len(mine) for mine in written] == [3, 3, 3, 3]
    assert [duty["model"][0] for duty in duties] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    for rank, mine in enumerate(written):
        for name in mine:
            assert [source.file for source in contents["model"][name].shards] == [duties[rank]["model"][0]]
