import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from bessemer.guard.detection import Alarm, GuardReference, History, SpikeLimits, observe, spike_limits
from bessemer.guard.incidents import SPIKE
from bessemer.guard.policy import GuardState, Verdict, judge
from bessemer.guard.trends import Trends
from bessemer.recipe import Guard
from bessemer.run.files import read_json_lines
from tests.guard.recorded import curves

SCALE = GuardReference(uniform_loss=math.log(512), clip_norm=1.0)
GUARD = Guard()


@pytest.mark.parametrize("loss", [1.0, 0.0])
def test_finite_steps_are_applied_and_reset_the_count(loss: float) -> None:
    judged = judge(GUARD, GuardState(2, 5), 9, loss, 3.0, SCALE)
    assert (judged.verdict, judged.alarm) == (Verdict.APPLY, None)
    assert (judged.state.nonfinite_in_a_row, judged.state.skipped) == (0, 5)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan), (1.0, math.nan)])
def test_non_finite_steps_are_skipped_and_the_third_in_a_row_is_lasting(loss: float, norm: float) -> None:
    state, verdicts, onsets = GuardState(), [], []
    for step in (5, 6, 7):
        judged = judge(GUARD, state, step, loss, norm, SCALE)
        state = judged.state
        verdicts.append(judged.verdict)
        assert judged.alarm is not None
        onsets.append(judged.alarm.onset)
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.ROLL_BACK] and onsets == [5, 5, 5]
    assert state == GuardState(3, 3, healthy_until=4)


def curve(steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """Return losses and gradient norms of a healthy run: a power law with noise."""
    draw = np.random.default_rng(seed)
    losses = 2.0 + 4.2 * (1 + np.arange(steps)) ** -0.4 + draw.normal(0, 0.05, steps)
    return list(zip(losses.tolist(), np.exp(draw.normal(-0.5, 0.2, steps)).tolist(), strict=True))


def step_after(history: History, step: int, loss: float, norm: float, **more: bool) -> tuple[History, Alarm | None]:
    """Observe a step, after which the spike limits follow from the windows."""
    history, alarm = observe(history, step, loss, norm, SCALE, **more)
    return replace(history, limits=spike_limits(history)), alarm


def alarms(numbers: list[tuple[float, float]], history: History | None = None) -> list[tuple[int, Alarm]]:
    found, history = [], history or History()
    for step, (loss, norm) in enumerate(numbers, start=1):
        history, alarm = step_after(history, step, loss, norm)
        if alarm is not None:
            found.append((step, alarm))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_raises_no_alarm(seed: int) -> None:
    assert alarms(curve(3000, seed)) == []


def test_a_spike_is_one_alarm_and_does_not_enter_the_window() -> None:
    numbers = curve(400)
    for step in (80, 300, 301, 302):
        loss, norm = numbers[step - 1]
        numbers[step - 1] = (loss + 4.0, norm * 50)
    found = alarms(numbers)
    assert [(step, alarm.kind.name, alarm.kind.response) for step, alarm in found] == [
        (step, "spike", "skip") for step in (80, 300, 301, 302)
    ]


def test_a_learning_rate_that_is_far_too_high_is_detected_from_the_first_steps() -> None:
    losses = [6.3, 7.4, 9.0, 12.0, 14.0, 15.0, 16.0, 16.5, 16.8, 16.9, 16.9, 16.9, 16.9]
    step, alarm = alarms([(loss, 4.0) for loss in losses])[0]
    assert (step, alarm.kind.name, alarm.onset) == (8, "diverged", 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_divergence_during_warmup_is_detected_within_ten_steps(seed: int) -> None:
    """Compare with the loss reached, not with the median of all steps since the start."""
    draw = np.random.default_rng(seed)
    losses = np.concatenate((np.linspace(6.2, 4.8, 45), np.full(60, 6.1))) + draw.normal(0, 0.1, 105)
    losses[[52, 61, 70]] = 5.2  # single steps are better
    step, alarm = alarms([(loss, 2.0) for loss in losses.tolist()])[0]
    assert alarm.kind.name == "diverged" and step <= 61 and 45 <= alarm.onset <= 47


def test_an_explosion_is_reported_once_in_a_hundred_steps() -> None:
    numbers = [(loss, 300.0) for loss, _ in curve(250)]
    assert [(step, alarm.kind.name) for step, alarm in alarms(numbers)] == [
        (1, "explosion"), (101, "explosion"), (201, "explosion"),
    ]  # fmt: skip


def test_the_state_survives_json_and_continues_equally() -> None:
    numbers = curve(700)
    numbers[650] = (9.0, 80.0)
    state, whole = GuardState(), []
    for step, (loss, norm) in enumerate(numbers, start=1):
        if step % 100 == 0:
            state = GuardState.from_dict(json.loads(json.dumps(asdict(state))))
        judged = judge(GUARD, state, step, loss, norm, SCALE)
        state = judged.state
        whole.append((judged.verdict, judged.alarm))
    assert [step for step, (verdict, _) in enumerate(whole, start=1) if verdict is Verdict.SKIP] == [651]
    assert [(step, alarm) for step, (_, alarm) in enumerate(whole, start=1) if alarm] == alarms(numbers)


def test_with_skipping_off_spikes_are_only_recorded() -> None:
    numbers, state, off = curve(200), GuardState(), GUARD.model_copy(update={"skip_spikes": False})
    for step, (loss, norm) in enumerate(numbers, start=1):
        state = judge(off, state, step, loss, norm, SCALE).state
    judged = judge(off, state, 201, 9.0, 80.0, SCALE)
    assert judged.verdict is Verdict.APPLY and judged.alarm is not None and judged.alarm.kind is SPIKE
    assert judged.state.skipped == 0


def test_a_model_that_learns_nothing_is_reported_once_and_continues() -> None:
    draw = np.random.default_rng(0)
    numbers = [(5.9 + noise, 1.0) for noise in draw.normal(0, 0.05, 1500).tolist()]
    found = alarms(numbers)
    assert [(step, alarm.kind.name, alarm.kind.response) for step, alarm in found] == [
        (100, "plateau", "record"),
        (1100, "plateau", "record"),
    ]
    assert alarms([(3.0 + noise, 1.0) for noise in draw.normal(0, 0.05, 300).tolist()]) == [], (
        "it has learned something"
    )


def test_a_frozen_history_still_judges_and_forgets_the_steps() -> None:
    """After a rollback the loss is low while the learning rate is; a rise above the earlier steps is detected at once."""
    history = History()
    for step, (loss, norm) in enumerate(curve(600), start=1):
        history, _ = step_after(history, step, loss, norm)
    before = history
    for step in range(601, 640):
        history, alarm = step_after(history, step, 1.5, 0.5, exclude_from_history=True)
        assert alarm is None
    assert replace(history, recent=before.recent) == before
    lost = 0.5 * (SCALE.uniform_loss + before.losses[-1])
    found = []
    for step in range(640, 660):
        history, alarm = step_after(history, step, lost, 0.5, exclude_from_history=True)
        found += [] if alarm is None else [(step, alarm.kind.name, alarm.onset)]
    assert found == [(646, "diverged", 640)]


def test_an_explosion_does_not_hide_what_follows_it() -> None:
    numbers = [(5.0, 200.0)] + [(9.0, 200.0)] * 30
    assert [alarm.kind.name for _, alarm in alarms(numbers)][:2] == ["explosion", "diverged"]


SPIKED = History(
    recent=(9.0,) * 31, losses=(1.0, 1.1) * 64, log_norms=(0.0, 0.1) * 64, first_losses=(6.0,) * 4, level=1.0
)


def test_spike_limits_equal_those_of_the_rule() -> None:
    limits = spike_limits(SPIKED)
    assert limits is not None and limits.num_steps == 128 and 1.1 < limits.loss < 3 and 1 < limits.grad_norm < 3
    above = np.nextafter(limits.loss, 10), np.nextafter(limits.grad_norm, 10)
    for loss, norm, is_spike in ((*above, True), (limits.loss, 9.0, False), (9.0, limits.grad_norm, False)):
        assert limits.exceeded_by(loss, norm) == is_spike
        alarm = observe(replace(SPIKED, quiet_until=99, limits=limits), 50, loss, norm, SCALE)[1]
        assert (alarm is not None and alarm.kind is SPIKE) == is_spike
    assert spike_limits(replace(SPIKED, losses=(1.0,) * 15)) is None
    assert SpikeLimits(1.0, 1.0, 16).exceeded_by(2.0, math.nan) is False


def test_the_update_of_a_spike_is_skipped_with_any_other_incident() -> None:
    """A step can be a spike and the last of a divergence."""
    spiked = replace(SPIKED, limits=spike_limits(SPIKED))
    judged = judge(GUARD, GuardState(history=spiked), 50, 9.0, 9.0, SCALE)
    assert (judged.verdict, judged.updates, judged.state.skipped) == (Verdict.ROLL_BACK, False, 1)
    judged = judge(GUARD, GuardState(history=replace(spiked, quiet_until=99)), 50, 9.0, 9.0, SCALE)
    assert (judged.verdict, judged.updates, judged.state.skipped) == (Verdict.SKIP, False, 1)


def test_limits_stay_in_force_until_they_are_renewed() -> None:
    state = GuardState(history=replace(SPIKED, recent=(1.0,) * 31, limits=SpikeLimits(2.0, 2.0, 20)))
    for _ in range(2):
        state = judge(GUARD, state, 50, 1.0, 1.0, SCALE, renews_limits=False).state
        assert state.history.limits == SpikeLimits(2.0, 2.0, 20)
    state = judge(GUARD, state, 51, 1.0, 1.0, SCALE).state
    assert state.history.limits == spike_limits(state.history) != SpikeLimits(2.0, 2.0, 20)


@pytest.mark.fault(20)
def test_recorded_healthy_runs_raise_no_alarm(
    is_thorough: bool, record_property: Callable[[str, object], None]
) -> None:
    reference, kinds, steps = GuardReference(math.log(384), 1.0), Counter[str](), 0
    every = 10  # train.log_every
    for run in curves()[: None if is_thorough else 2].tolist():
        history = History()
        for step, (loss, norm) in enumerate(run, start=1):
            history, alarm = observe(history, step, loss, norm, reference)
            if step % every == 0:
                history = replace(history, limits=spike_limits(history))
            kinds[alarm.kind.name if alarm else "none"] += 1
        steps += len(run)
    assert set(kinds) <= {"none", "spike"}, "nothing that would roll back, and nothing noted"
    assert kinds["spike"] <= 2 * steps / 10_000
    record_property("obtained", f"0 rollbacks and {kinds['spike']} skipped steps in {steps:,}")


def kinds(path: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["what"]) for row in read_json_lines(path)] if path.exists() else []


@pytest.mark.parametrize(
    ("statistic", "kind", "healthy"),
    [("attention_logit_max", "attention", 15.0), ("activation_rms", "activation", 1.0)],
)
def test_growth_inside_the_model_is_reported_with_its_block(
    tmp_path: Path, statistic: str, kind: str, healthy: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(10, 110, 10):
        trends.add_statistics(step, {statistic: {"0": healthy, "1": healthy * (1 + step / 100)}})
    assert kinds(path) == [], "it doubles"
    for step in range(110, 150, 10):
        trends.add_statistics(step, {statistic: {"0": healthy, "1": 10 * healthy}})
    assert kinds(path) == [(110, kind)], "once"
    assert "in block 1" in capsys.readouterr().err


def test_a_router_that_collapses_is_reported_at_its_onset_and_again_only_much_later(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    trends, rows = Trends(path), []

    def few(step: int) -> bool:
        return 20 <= step < 40 or 45 <= step < 60 or step >= 1100

    for step in range(1, 1200):
        entropy = {"2": 0.6 if few(step) else 0.9, "3": 1.0}  # 8^0.6 = 3.5 of 8 experts
        largest = {"2": 1.0, "3": 8.0 if step >= 1005 else 0.5}
        rows.append({"kind": "train", "step": step, "load_entropy": entropy, "max_violation": largest,
                     "expert_load": {"2": "10" * 8, "3": "10" * 8}})  # fmt: skip
        if step in (30, 1010):  # resumed: the count of logged steps continues
            trends = Trends(path, rows[:-1])
        trends.add_load(step, rows[-1], is_balanced=step < 1000)
        trends.add_load(step, {"loss": 1.0})
    assert [(row["step"], row["block"], "balancing is off" in row["cause"]) for row in read_json_lines(path)] == [
        (29, "2", False), (1014, "3", True), (1109, "2", True),
    ]  # fmt: skip


def test_slower_steps_are_reported_and_slow_validations_are_not(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(1, 257):
        trends.add_step(step, 5.0 if step % 32 == 0 else 0.1, 0.0)
    assert kinds(path) == []
    for step in range(257, 513):
        trends.add_step(step, 0.21, 0.0)
    assert kinds(path) == [(384, "slow")]


def test_waiting_for_data_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(1, 65):
        trends.add_step(step, 0.1, 0.001)
    for step in range(65, 193):
        trends.add_step(step, 0.2, 0.1)
    assert kinds(path) == [(192, "data_wait")]


def test_rolled_back_steps_leave_the_windows(tmp_path: Path) -> None:
    trends = Trends(tmp_path / "incidents.jsonl")
    for step in range(10, 160, 10):
        trends.add_statistics(step, {"activation_rms": {"0": 1.0 if step < 60 else 3.9}})
    trends.rewind([{"kind": "inside", "step": step, "activation_rms": {"0": 1.0}} for step in range(10, 60, 10)])
    trends.add_statistics(60, {"activation_rms": {"0": 5.0}})
    assert kinds(tmp_path / "incidents.jsonl") == [(60, "activation")]


def test_missing_statistics_are_not_measurements(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    name = "attention_logit_max"
    rows = [{"kind": "inside", name: {"0": 20.0, "1": None}}] * 8 + [
        {"kind": "inside", name: {"0": None, "1": None}}
    ] * 9
    trends = Trends(path, rows)
    trends.add_statistics(20, {name: {"0": 60.0}})
    assert kinds(path) == [], "three times the median of what was measured"
    for step in range(21, 36):
        trends.add_statistics(step, {name: {"0": 20.0, "1": math.nan}})
    trends.add_statistics(36, {name: {"0": 90.0}})
    assert kinds(path) == [(36, "attention")]
