"""Short measurements of the machine, so that tests do not depend on its speed."""


def measure_little() -> None:
    """Shorten the measurements in this process and its forks."""
    from bessemer.cli import experiments
    from bessemer.ladder import runs
    from bessemer.train import device, measure, precision
    from bessemer.workflow import derive

    derive.PROBE_SECONDS = runs.PROBE_SECONDS = experiments.RUNG_SECONDS = 0.0
    measure.TIMED_STEPS, measure.WARMUP_STEPS = 2, 1
    precision.cpu_flags = frozenset  # no matrix units: train.precision auto is fp32
    device.CPU_MATMUL_EDGES, device.MATMUL_SECONDS = (256,), 0.0
