"""Experiments that teach and prove: one file each, with `run()` giving plain numbers and `show(result)` a text."""

# Name on the command line: the module, and what it shows.
STUDIES: dict[str, tuple[str, str]] = {
    "precision": ("bessemer.studies.precision", "where fp16 fails and bf16 does not, in numbers"),
}
