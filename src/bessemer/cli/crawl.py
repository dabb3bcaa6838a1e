"""`bessemer crawl`: what a crawl takes from raw pages to tokens: core-hours, storage, machines, money."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    crawl_ = commands.add("crawl", "what a crawl takes to become tokens: core-hours, storage, money", crawl)
    crawl_.add_argument("size", metavar="SIZE", help="of the compressed crawl, for example 100TB")
    crawl_.add_argument("--cores", type=int, default=64, metavar="N", help="cores of a machine (default 64)")
    crawl_.add_argument("--machines", type=int, default=16, metavar="N", help="machines (default 16)")
    crawl_.add_argument("--memory", default="256GB", metavar="SIZE", help="memory of a machine (default 256GB)")
    crawl_.add_argument("--price", type=float, default=0.05, metavar="P", help="of a core for an hour (default 0.05)")
    crawl_.add_argument(
        "--storage-price", type=float, default=0.023, metavar="P", help="of a gigabyte for a month (default 0.023)"
    )
    crawl_.add_argument("--rates", metavar="FILE", help="measured rates, as benchmarks/corpus_rates.py writes them")


def crawl(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.plan import corpus

    planned = corpus.plan(
        corpus.parse_bytes(args.size),
        corpus.load_rates(Path(args.rates) if args.rates else None),
        machines=args.machines,
        cores=args.cores,
        memory_bytes=corpus.parse_bytes(args.memory),
        price=args.price,
        storage_price=args.storage_price,
    )
    if not args.json:
        print(corpus.table(planned))
    return planned
