"""Short measurements of the machine, so that tests do not depend on its speed, and work that forks need not repeat."""

import importlib.metadata
import os
import sys
from functools import cache
from types import SimpleNamespace


def measure_little() -> None:
    """Shorten the measurements in this process and its forks."""
    from bessemer.cli import experiments
    from bessemer.common import environment, extensions
    from bessemer.ladder import runs
    from bessemer.train import device, measure, precision
    from bessemer.workflow import derive

    derive.PROBE_SECONDS = runs.PROBE_SECONDS = experiments.RUNG_SECONDS = 0.0
    measure.TIMED_STEPS, measure.WARMUP_STEPS = 2, 1
    os.fsync = lambda file: None  # no test cuts the power
    precision.cpu_flags = frozenset  # no matrix units: train.precision auto is fp32
    device.CPU_MATMUL_EDGES, device.MATMUL_SECONDS = (256,), 0.0
    # Each training lists the installed packages and reads their entry points several times, which takes half a second.
    installed = [SimpleNamespace(name=one.name, version=one.version) for one in environment.distributions()]
    environment.distributions = lambda: installed
    of_path = cache(lambda path: importlib.metadata.entry_points())
    extensions.entry_points = lambda group: of_path(tuple(sys.path)).select(group=group)


def compile_text_passes() -> None:
    """Load, or compile, the functions that every corpus uses."""
    from bessemer.corpus.dedup.signatures import shingle_sets, signatures
    from bessemer.recipe import Dedup
    from bessemer.text.statistics import Statistics

    text = Statistics("One two three.\n\n- one two three...\n" * 3)
    for name in ("characters", "lines", "line_marks", "repeated_lines", "repeated_paragraphs", "words", "sentences"):
        getattr(text, name)
    _ = text.encoded_characters(64), text.num_stop_words(("one",))
    _ = text.top_ngram_characters(2), text.repeated_ngram_characters(5)
    _ = signatures(["one two"], Dedup()), shingle_sets(["one two"], Dedup())
