"""Edges of a component meet in one group however they are spread, in few rounds."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bessemer.corpus.dedup.exchange import SplitWriter, read_split
from bessemer.corpus.dedup.keepers import EDGES, GroupEdges, LinkNeighbours
from bessemer.corpus.dedup.task import EDGE, DedupPlan, records, spread
from bessemer.recipe import Dedup

NUM_PARTS, NUM_GROUPS = 2, 3
PLAN = DedupPlan(Dedup(), (), NUM_PARTS, 1000, "test")


def paths(draw: random.Random) -> list[tuple[int, int]]:
    """Chains of 1 to 200 edges through numbers in any order: the worst case of the rounds."""
    numbers, edges = draw.sample(range(1 << 40), 1000), []
    while len(numbers) > 201:
        chain = [numbers.pop() for _ in range(draw.randrange(2, 202))]
        edges += list(pairwise(chain))
    return edges


def stars(draw: random.Random) -> list[tuple[int, int]]:
    """A centre with 300 neighbours, which are linked among themselves too, and pairs."""
    numbers = draw.sample(range(1 << 40), 500)
    edges = [(numbers[0], other) for other in numbers[1:301]]
    edges += [tuple(draw.sample(numbers[1:301], 2)) for _ in range(200)]  # type: ignore[misc]
    return edges + list(zip(numbers[301::2], numbers[302::2], strict=False))


def random_graph(draw: random.Random) -> list[tuple[int, int]]:
    numbers = draw.sample(range(1 << 40), 400)
    return [tuple(draw.sample(numbers, 2)) for _ in range(250)]  # type: ignore[misc]


def components(edges: list[tuple[int, int]]) -> dict[int, int]:
    """The smallest number of the component of each."""
    smallest = {number: number for edge in edges for number in edge}
    changed = True
    while changed:
        changed = False
        for one, other in edges:
            least = min(smallest[one], smallest[other])
            changed |= smallest[one] != least or smallest[other] != least
            smallest[one] = smallest[other] = least
    return smallest


@pytest.mark.parametrize("graph", [paths, stars, random_graph])
def test_edges_of_a_component_meet_in_one_group(graph, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    draw = random.Random(0)
    edges = graph(draw)
    pairs = np.array([draw.sample(edge, 2) for edge in edges], dtype=np.uint64)
    for part, chosen in enumerate(np.array_split(pairs, NUM_PARTS)):
        folder = tmp_path / EDGES / f"{part:06d}"
        folder.mkdir(parents=True)
        with SplitWriter(folder / "edges", NUM_GROUPS) as file:
            file.write(
                spread(chosen.max(axis=1), NUM_GROUPS),
                records(EDGE, len(chosen), first=chosen[:, 0], second=chosen[:, 1]),
            )
    half = unchanged = 0
    while half % 2 or unchanged < 2:
        half += 1
        done = [LinkNeighbours(tmp_path, PLAN, number, 0, half, NUM_GROUPS).run() for number in range(NUM_GROUPS)]
        unchanged = 0 if any(one["changed"] for one in done) else unchanged + 1
    assert half <= 20
    expected, found = components(edges), []
    for number in range(NUM_GROUPS):
        GroupEdges(tmp_path, PLAN, number, 0, half, NUM_GROUPS).run()
    files = [tmp_path / "GroupEdges" / f"{number:06d}" / "edges" for number in range(NUM_GROUPS)]
    for group in range(NUM_GROUPS):
        here = read_split(files, group, EDGE)
        found += [tuple(sorted(edge)) for edge in here[["first", "second"]].tolist()]
        roots = np.array([expected[number] for number in here["first"].tolist()], dtype=np.uint64)
        assert (spread(roots, NUM_GROUPS) == group).all()
    assert sorted(found) == sorted(tuple(sorted(edge)) for edge in edges)
