"""`bessemer diagnose`: what was wrong with a step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs

if TYPE_CHECKING:
    import argparse

    from bessemer.train.diagnose import Diagnosis

SHOWN_SEQUENCES, SHOWN_DOCUMENTS = 5, 3


def add(commands: Any) -> None:
    diagnose_ = commands.add(
        "diagnose", "take a step of a run again, and say what was wrong: machine, precision, data or weights", diagnose
    )
    options.add_run(diagnose_)
    diagnose_.add_argument(
        "--step", type=int, required=True, metavar="N", help="the step (1-based), as incidents.jsonl names it"
    )


def diagnose(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.tokens import ledger
    from bessemer.train.diagnose import diagnose

    session, resolved = runs.open_trained(args)
    found = diagnose(resolved, session.run, args.step)
    names = [name for one in found.sequences[:SHOWN_SEQUENCES] for name in one.documents[:SHOWN_DOCUMENTS]]
    documents = ledger.known(session.run.corpus, names, text=True)
    if not args.json:
        _print(found, documents)
    return {**found.to_dict(), "documents": documents}


def _print(found: Diagnosis, documents: dict[str, dict[str, Any]]) -> None:
    from bessemer.train.diagnose import KINDS

    print(f"step {found.step}: {found.kind}: {KINDS[found.kind]}")
    if found.incident is not None:
        row = found.incident
        print(f"  the run recorded at step {row['step']}: {row['what']}: {row['cause']}; {row['action']}")
        if row["onset"] < found.step:
            print(f"  that began at step {row['onset']}: look at it too")
    since = f"step {found.replayed_from}" if found.replayed_from else "the start"
    first = found.first_difference
    print(
        f"  taken again from {since}; " + (f"step {first} was the first to differ" if first else "every step repeats")
    )
    for finding in found.findings:
        print(f"  {finding}")
    print("the worst sequences of its batch, each alone")
    for one in found.sequences[:SHOWN_SEQUENCES]:
        print(f"  sample {one.sample}: {one.figures}")
        for name in one.documents[:SHOWN_DOCUMENTS]:
            known = documents.get(name, {})
            place = " ".join(str(known[key]) for key in ("path", "place") if known.get(key, "") != "")
            print(f"    {name}{f'  {place}' if place else ''}")
            if text := " ".join(str(known.get("text", "")).split()):
                print(f"      {text[:160]}")
        if (rest := len(one.documents) - SHOWN_DOCUMENTS) > 0:
            print(f"    and {rest} more")
