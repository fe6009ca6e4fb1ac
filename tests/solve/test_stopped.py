import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import LAYERS, random_covariance
from helpers.internals import PAPERS_RANGE
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.solve import Reason, stopping_times

STEP, PATHS = 0.03, 64
TIMES = np.linspace(0.0, 0.45, 16)
"""Every step is saved; programs are compiled for 16 saved times, and no more."""

STARTS = {
    "attention": ("attention", 5 * si.equicorrelated(tokens=3, correlation=0.2)),
    "mlp": ("mlp", random_covariance(3)),
}
CASES = {
    "explosions": ("attention", PAPERS_RANGE, {Reason.NOT, Reason.EXPLODED}),
    "narrow attention": ("attention", (1e-8, 50.0), {Reason.NOT, Reason.ABOVE, Reason.EXPLODED}),
    "mlp": ("mlp", (0.05, 5.0), {Reason.NOT, Reason.ABOVE, Reason.BELOW}),
}
"""Where from, the range, and the reasons for which some of the paths stop."""

IN_DTYPES = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mlp", "float64"),
        ("narrow attention", "float32"),
        pytest.param("explosions", "float64", marks=pytest.mark.long),
    ],
)
"""By default two that have all reasons between them, one in each precision."""


def problem(start: str, dtype: str) -> dict:
    name, V0 = STARTS[start]
    V0 = V0.astype(dtype)
    return {"layer": LAYERS[name](), "V0": V0, "ts": TIMES, "paths": PATHS, "step": STEP, "key": jr.key(20230630)}


@functools.cache
def stopped(case: str, dtype: str):
    start, within, _ = CASES[case]
    return si.simulate_stopped(**problem(start, dtype), within=within)


@functools.cache
def unstopped(start: str, dtype: str) -> np.ndarray:
    return np.asarray(si.simulate(**problem(start, dtype)))


def times_of(paths) -> np.ndarray:
    """Stopping times in double precision, as numbers of TIMES where they were rounded to single."""
    time = np.asarray(paths.time, np.float64)
    nearest = TIMES[np.abs(TIMES - time[:, None]).argmin(axis=1)]
    np.testing.assert_array_equal(nearest[np.isfinite(time)].astype(paths.time.dtype), paths.time[np.isfinite(time)])
    return np.where(np.isfinite(time), nearest, np.inf)


@IN_DTYPES
def test_paths_stop_for_every_reason_that_there_is(case, dtype):
    found = stopped(case, dtype)
    assert found.covariance.dtype == found.time.dtype == dtype
    assert found.covariance.shape[:2] == (PATHS, len(TIMES))
    assert set(np.unique(found.reason)) == CASES[case][2]
    np.testing.assert_array_equal(np.isinf(found.time), found.reason == Reason.NOT)
    assert jnp.isfinite(found.covariance).all()


@IN_DTYPES
def test_paths_are_inside_until_they_stop_and_stay_as_they_were(case, dtype):
    found, (lowest, highest) = stopped(case, dtype), CASES[case][1]
    V, time = np.asarray(found.covariance, np.float64), times_of(found)
    eigenvalues, size = np.linalg.eigvalsh(V), np.trace(V, axis1=-2, axis2=-1)
    # V − lowest I and highest I − V are definite, or not, up to the rounding of their factorisation.
    rounding = 8 * V.shape[-1] * float(jnp.finfo(dtype).eps)
    over_lowest = eigenvalues[..., 0] - lowest, rounding * (size + lowest)
    under_highest = highest - eigenvalues[..., -1], rounding * (size + highest)
    inside = (over_lowest[0] > -over_lowest[1]) & (under_highest[0] > -under_highest[1])
    ended = {
        Reason.ABOVE: under_highest[0] <= under_highest[1],
        Reason.BELOW: over_lowest[0] <= over_lowest[1],
        Reason.EXPLODED: inside,
    }
    for path, (at, reason) in enumerate(zip(time, np.asarray(found.reason), strict=True)):
        assert inside[path, at > TIMES].all()
        if reason != Reason.NOT:
            after = V[path, at <= TIMES]
            assert ended[reason][path, at <= TIMES].all()
            assert (np.abs(after - after[-1]) <= rounding * size[path, -1]).all()
            # Diffrax interpolates up to the end of the last step, which rounds.
            np.testing.assert_array_equal(after[1:], np.broadcast_to(after[-1], after[1:].shape))


@pytest.mark.long
@IN_DTYPES
def test_paths_are_those_of_simulate_until_they_stop(case, dtype):
    found, V = stopped(case, dtype), unstopped(CASES[case][0], dtype)
    until = times_of(found)[:, None] >= TIMES
    assert np.isfinite(V[until]).all()
    assert_agrees(found.covariance[until], V[until], rtol=8 * V.shape[-1] * len(TIMES) * float(jnp.finfo(dtype).eps))


@IN_DTYPES
def test_observed_paths_stop_when_and_why_simulated_ones_do(case, dtype):
    found, V = stopped(case, dtype), unstopped(CASES[case][0], dtype)
    time, reason = stopping_times(V, TIMES, within=CASES[case][1])
    exploded = np.asarray(found.reason) == Reason.EXPLODED
    np.testing.assert_array_equal(time[~exploded], times_of(found)[~exploded])
    np.testing.assert_array_equal(reason[~exploded], np.asarray(found.reason)[~exploded])
    # Observed, an explosion is a number too large.
    assert (time[exploded] > times_of(found)[exploded]).all()
    assert (reason[exploded] == Reason.ABOVE).all()
    # Stopped already, they stop at the same time again.
    again, why = stopping_times(np.asarray(found.covariance), TIMES, within=CASES[case][1])
    np.testing.assert_array_equal(again[~exploded], time[~exploded])
    np.testing.assert_array_equal(why[~exploded], reason[~exploded])


@pytest.mark.one_case
@pytest.mark.parametrize(("case", "dtype"), [("narrow attention", "float32"), ("explosions", "float64")])
def test_simulate_is_infinite_after_an_explosion_and_only_there(case, dtype):
    V, found = unstopped("attention", dtype), stopped(case, dtype)
    exploded = np.asarray(found.reason) == Reason.EXPLODED
    assert not np.isnan(V).any()
    later = times_of(found)[:, None] < TIMES
    assert later[exploded].any()
    known = exploded | (np.asarray(found.reason) == Reason.NOT)  # those that leave the range may explode later on
    np.testing.assert_array_equal(np.isinf(V).any(axis=(-2, -1))[known], later[known])
    assert (V[exploded[:, None] & later] == np.inf).all()


AT_ONCE = {
    "above": ("mlp", np.diag([0.5, 1.0, 2e4]), PAPERS_RANGE, Reason.ABOVE),
    "below": ("mlp", np.diag([5e-5, 1.0, 2.0]), PAPERS_RANGE, Reason.BELOW),
    "singular": ("mlp", np.ones((3, 3)), (0.0, 4.0), Reason.BELOW),
    "both": ("mlp", np.diag([5e-5, 1.0, 2e4]), PAPERS_RANGE, Reason.ABOVE),
    "explosion": ("attention", 100 * si.equicorrelated(tokens=3, correlation=0.2), PAPERS_RANGE, Reason.EXPLODED),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.long] * (x == "explosion")) for x in AT_ONCE])
def test_a_v0_that_cannot_go_on_stops_at_time_zero(name, key):
    layer, V0, within, reason = AT_ONCE[name]
    found = si.simulate_stopped(LAYERS[layer](), V0, [0.0, 0.1], within=within, paths=3, step=0.05, key=key)
    np.testing.assert_array_equal(found.time, 0)
    np.testing.assert_array_equal(found.reason, reason)
    assert_agrees(found.covariance, np.broadcast_to(V0, (3, 2, 3, 3)), rtol=1e-15)


@pytest.mark.long
def test_stopped_paths_can_be_differentiated_while_they_stop_in_the_same_step(key):
    def mean(values):
        layer = si.ShapedAttention(values[0], values[1], pattern=si.CAUSAL)
        V0 = values[2] * si.equicorrelated(tokens=2, correlation=0.2)
        found = si.simulate_stopped(layer, V0, [0.1, 0.3], within=(1e-4, 14.0), paths=24, step=0.05, key=key)
        return jnp.mean(found.covariance), found

    at, step = jnp.array([0.7, 0.8, 7.0]), 1e-5
    function = jax.jit(jax.value_and_grad(mean, has_aux=True))
    (_, found), gradient = function(at)
    assert set(np.unique(found.reason)) == {Reason.NOT, Reason.ABOVE, Reason.EXPLODED}
    for slope, unit in zip(gradient, jnp.eye(3), strict=True):
        (up, one), (down, other) = (function(at + sign * step * unit)[0] for sign in (1, -1))
        np.testing.assert_array_equal(one.time, other.time)
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


def test_what_is_not_finite_was_above():
    V = np.broadcast_to(np.eye(2), (6, 4, 2, 2)).copy()
    V[1, 2, 0, 1] = np.nan
    V[2, 1] = np.inf
    V[3, 3] = -np.inf
    V[4, 1] *= 1e-5
    V[4, 2] = np.nan
    V[5] *= 1e5
    time, reason = stopping_times(V, [0.0, 0.5, 1.0, 1.5])
    np.testing.assert_array_equal(time, [np.inf, 1.0, 0.5, 1.5, 0.5, 0.0])
    expected = [Reason.NOT, Reason.ABOVE, Reason.ABOVE, Reason.ABOVE, Reason.BELOW, Reason.ABOVE]
    np.testing.assert_array_equal(reason, expected)
