"""What a run measures of its machine, made short: tests do not depend on how fast it is."""


def measure_little() -> None:
    """In this process, and those forked from it."""
    from bessemer.cli import experiments
    from bessemer.ladder import runs
    from bessemer.train import device, measure, precision
    from bessemer.workflow import derive

    derive.PROBE_SECONDS = runs.PROBE_SECONDS = experiments.RUNG_SECONDS = 0.0
    measure.TIMED_STEPS, measure.WARMUP_STEPS = 2, 1
    precision.cpu_flags = frozenset  # no units: train.precision auto is fp32
    device.CPU_MATMUL_EDGES, device.MATMUL_SECONDS = (256,), 0.0
