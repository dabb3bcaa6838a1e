"""The mixture search: regressions on losses of a known form, and `bessemer ladder --mixture` end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from bessemer.cli import run_command
from bessemer.ladder import shares
from bessemer.ladder.law import Array


def mixed(points: Array, weights: Array, floor: Array, scale: Array) -> Array:
    """Return (n, k) losses by the law of data mixing: c_k + s_k exp(sum_i t_ik r_i) (Ye et al. 2024)."""
    return np.asarray(floor + scale * np.exp(points @ weights))


WEIGHTS = np.array([[-1.2, -0.1, -0.3], [-0.2, -1.5, -0.2], [-0.4, -0.2, -0.9]])
FLOOR, SCALE = np.array([2.0, 1.6, 2.4]), np.array([1.5, 2.0, 1.0])


def points_of(count: int, seed: int = 0) -> Array:
    return shares.spread_out(np.array([0.6, 0.3, 0.1]), count, np.ones(3), seed)


def test_points_are_on_the_simplex_and_spread_out() -> None:
    points = points_of(14)
    assert points.sum(axis=1) == pytest.approx(1.0) and (points >= 0).all()
    assert points[0] == pytest.approx([0.6, 0.3, 0.1]), "the given mixture is the first"
    assert (points.max(axis=0) > 0.85).all(), "each source is tried nearly alone"
    apart = np.linalg.norm(points[:, None] - points[None], axis=2) + np.eye(14)
    assert apart.min() > 0.05
    bounded = shares.spread_out(np.array([0.6, 0.3, 0.1]), 14, np.array([1.0, 1.0, 0.25]), 0)
    assert bounded[:, 2].max() <= 0.25 + 1e-9 and bounded.sum(axis=1) == pytest.approx(1.0)


def test_the_regression_finds_the_best_mixture_of_a_known_law() -> None:
    """The proposal from 16 losses without noise is compared with a search of the law itself."""
    points = points_of(16)
    losses = mixed(points, WEIGHTS, FLOOR, SCALE)
    models = [shares.choose(points, losses[:, k]) for k in range(3)]
    assert all(model.error < 0.01 for model in models), [model.form for model in models]
    rows = shares.candidates(np.zeros(3), np.ones(3), points[0], 0)
    proposed = shares.lowest(models, rows, np.zeros(3), np.ones(3))

    def of(row: Array) -> float:
        return float(mixed(np.abs(row) / np.abs(row).sum(), WEIGHTS, FLOOR, SCALE).mean())

    best = min(
        (minimize(of, start, method="Nelder-Mead", options={"fatol": 1e-10}) for start in points), key=lambda r: r.fun
    )
    assert of(proposed) - best.fun < 0.02 * (of(points[0]) - best.fun) + 1e-4
    said = shares.mean_of(models, proposed[None])[0]
    assert said == pytest.approx(of(proposed), abs=0.005)


def test_leave_one_out_by_the_hat_matrix_equals_refitting() -> None:
    points = points_of(12)
    losses = mixed(points, WEIGHTS, FLOOR, SCALE)[:, 0] + 0.01 * np.random.default_rng(0).standard_normal(12)
    found = shares.regression("quadratic", 1e-3, 0.0, points, losses)
    anew = shares.left_out(found, points, losses)
    # One uses the scale of the features and the level of all runs, the other those of the remaining runs.
    assert np.sqrt(np.mean((losses - anew) ** 2)) == pytest.approx(found.error, rel=0.25)


def test_without_a_gain_the_interval_contains_zero_as_often_as_it_claims() -> None:
    """Losses that no share changes: among 15 searches, the lower end of the 90% interval is rarely above 0."""
    wrong = 0
    for seed in range(15):
        points = points_of(10, seed)
        losses = 3.0 + 0.02 * np.random.default_rng(seed).standard_normal(10)
        model = shares.choose(points, losses)
        least, most = points.min(axis=0), points.max(axis=0)
        rows = shares.candidates(least, most, points[0], seed)
        proposed = shares.lowest([model], rows, least, most)
        drawn = shares.drawn(model, points, 200, np.random.default_rng(seed))
        found = shares.gain([model], [drawn], points[0], proposed, rows)
        wrong += bool(np.percentile(found.drawn, 5) > 0)
    assert wrong <= 3, wrong  # a binomial of 15 and 0.05 is above 3 once in 180


@pytest.mark.long
def test_a_mixture_search_end_to_end(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["ladder", str(wide / "wide.toml"), "--mixture", "--rungs", "5", "--budget", "2.4e9", "--verify", "--json"]
    assert run_command(given) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"kind", "keys", "sources", "targets", "given", "proxy", "proxies", "regressions", "left_out_error", "spread_of_targets",
            "proposed", "gain", "verify", "answers", "columns", "rows", "folder", "page"}  # fmt: skip
    assert set(found) == keys
    assert found["sources"] == ["prose", "code"] and sum(found["given"].values()) == pytest.approx(1.0)
    assert len(found["proxies"]) == 5
    for number, row in enumerate(found["proxies"]):
        run = next(Path(found["folder"]).glob(f"runs/{number:02d}-*"))
        drawn = json.loads((run / "mixture.json").read_text())["sources"]
        for name, share in row["shares"].items():
            assert drawn[name]["drawn_share"] == pytest.approx(share, abs=0.03), "the proxy read what it was to read"
        assert row["target"] == pytest.approx(np.mean(list(row["loss_by_source"].values())))
    most_code = max(found["proxies"], key=lambda row: row["shares"]["code"])
    least_code = min(found["proxies"], key=lambda row: row["shares"]["code"])
    assert most_code["loss_by_source"]["code"] < least_code["loss_by_source"]["code"]
    assert most_code["loss_by_source"]["prose"] > least_code["loss_by_source"]["prose"]
    assert sum(found["proposed"]["shares"].values()) == pytest.approx(1.0)
    gain, checked = found["gain"], found["verify"]
    assert gain["low"] <= gain["value"] <= gain["high"] and gain["inside_noise"] == (gain["low"] <= 0)
    assert checked["error"] == pytest.approx(checked["predicted"] / checked["measured"] - 1)
    assert '"id":"ladder-mixture"' in Path(found["page"]).read_text()
    # The same for one source: nothing is trained, and that source gets the largest possible share.
    assert run_command([*given[:-2], "--target", "code", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["proposed"]["shares"]["code"] > found["given"]["code"]
    assert [row["loss_by_source"] for row in alone["proxies"]] == [row["loss_by_source"] for row in found["proxies"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rungs", "3"], "2 sources need 5 proxies or more"),
        (["--budget", "1e7"], "too small for 8 proxies"),
        (["--target", "cod"], "there are prose, code, mean"),
        (["--design", "ratio"], "leave out --design"),
    ],
)
def test_wrong_input_is_an_error(
    options: list[str], words: str, wide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["ladder", str(wide / "wide.toml"), "--mixture", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_single_source_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "one.toml"
    recipe.write_text(
        '[run]\nname = "one"\n[[corpus.sources]]\nname = "text"\nformat = "text"\npaths = ["."]\n[model]\ndepth = 4\n'
    )
    assert run_command(["ladder", str(recipe), "--mixture"]) == 2
    assert "one source (text)" in capsys.readouterr().err
