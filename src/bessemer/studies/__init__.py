"""Experiments that teach and prove: one file each, with `run()` giving plain numbers and `show(result)` a text."""

# Name on the command line: the module, and what it shows.
STUDIES: dict[str, tuple[str, str]] = {
    "bidirectional-vs-causal": (
        "bessemer.studies.bidirectional_vs_causal",
        "what a transformer can and cannot do when it sees both sides, or only the left",
    ),
    "frozen-vs-full": (
        "bessemer.studies.frozen_vs_full",
        "a classifier on a frozen encoder, on one trained along, and from scratch",
    ),
}
