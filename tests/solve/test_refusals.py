"""What cannot be solved is refused in one line, that says what and where."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import LAYERS
from helpers.internals import check_parameters

import sdeinfer as si
from sdeinfer.solve import stopping_times

MLP, EYE, KEY = LAYERS["mlp"](), np.eye(2), jr.key(0)
INDEFINITE = np.array([[1.0, 2.0], [2.0, 1.0]])


def simulate(*, V0=EYE, layer=MLP, **change):
    return si.simulate(layer, V0, **({"ts": [0.0, 0.1], "paths": 2, "step": 0.02} | change), key=KEY)


def within(*bounds):
    return si.simulate_stopped(MLP, EYE, [0.1], within=bounds, paths=1, key=KEY)


def over_depth(**profiles):
    return si.OverDepth(LAYERS["transformer"](), **profiles)


def traced(run, argument):
    return lambda: jax.jit(run)(argument)


NO_RANGE = "within: 0 ≤ lowest < highest < ∞ is needed, got "
TIMES = "ts: a non-empty list of finite times is needed"

REFUSED = [
    (lambda: simulate(paths=0), "paths: a whole number of at least 1 is needed, got 0"),
    (lambda: simulate(step=-0.1), "step: must be positive and finite, got -0.1"),
    (lambda: simulate(step=float("nan")), "step: must be positive and finite, got nan"),
    (lambda: simulate(step=1e-15), "step: 1e-15 cuts the time to 0.1 into more than 1000000 steps"),
    (lambda: simulate(ts=[100.0, 100.000001], step=1.0), "step: 1e-06 is too short for single precision at times of 1"),
    (lambda: simulate(ts=[]), TIMES + r", got shape \(0,\)"),
    (lambda: simulate(ts=1.0), TIMES + r", got shape \(\)"),
    (lambda: simulate(ts=[0.1, 0.1]), "ts: times must start at 0 or later and increase"),
    (lambda: simulate(ts=[-0.1, 0.1]), "ts: times must start at 0 or later and increase"),
    (traced(lambda ts: simulate(ts=ts), jnp.array([0.1])), "ts: the times must be known .* got traced values; inside"),
    (traced(lambda t: simulate(ts=[t, 2 * t]), 0.1), "ts: the times must be known when the solver is compiled"),
    (lambda: simulate(V0=INDEFINITE), "V0: not positive semi-definite: smallest eigenvalue -1"),
    (lambda: simulate(V0=np.array([[1.0, np.nan], [np.nan, 1.0]])), "V0: 2 entries are NaN or infinite"),
    (lambda: si.simulate_stopped(MLP, EYE, [0.1], paths=0, key=KEY), "paths: a whole number of at least 1"),
    (lambda: within(1.0, 1.0), NO_RANGE + "1 and 1"),
    (lambda: within(float("nan"), 1.0), NO_RANGE + "nan and 1"),
    (lambda: stopping_times(np.ones((1, 1, 1, 1)), [0.0], within=(0.0, float("nan"))), NO_RANGE + "0 and nan"),
    (lambda: si.tangents(MLP, EYE, [0.1], np.eye(3), paths=1, key=KEY), r"directions: shape \(2, 2\) of V0 is needed"),
    (lambda: si.tangents(MLP, EYE, [0.1], EYE, cross=2 * EYE, paths=1, key=KEY), "V0, cross and directions: not posit"),
    (lambda: over_depth(gama=lambda t: t), "gama: the layer has no such parameter"),
    (lambda: simulate(layer=over_depth(gamma=lambda t: 1.15 + t)), "gamma"),
    (lambda: over_depth(gamma=lambda t: t).limit(), ".*parameters change with depth"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_one_line_says_what_is_wrong(call, message):
    with pytest.raises(si.InputError, match=f"^{message}") as refusal:
        call()
    assert "\n" not in str(refusal.value)


@pytest.mark.long
@pytest.mark.parametrize("compile_it", [jax.jit, eqx.filter_jit], ids=["jit", "filter_jit"])
def test_traced_values_raise_at_run_time(compile_it):
    run = compile_it(lambda V0: simulate(V0=V0, step=0.1))
    assert jnp.isfinite(run(jnp.ones((2, 2)))).all()
    for V0 in ([[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, -1e-3]], [[1.0, 0.0], [0.0, np.nan]]):
        with pytest.raises(Exception, match="V0: not .*positive semi-definite"):  # noqa: B017, PT011 JAX wraps it
            run(jnp.array(V0)).block_until_ready()
    with pytest.raises(Exception, match="out of range"):  # noqa: B017, PT011
        compile_it(lambda gamma: simulate(layer=si.ResidualFeedForward(gamma, 1.0, -1.0)))(1.5).block_until_ready()


def test_errors_at_run_time_name_the_parameter():
    """Also of a profile over depth; without the compilation of a solver."""
    base, times = si.ResidualFeedForward(0.5, 1.0, -1.0), np.array([0.5, 1.0])
    checked = eqx.filter_jit(
        lambda last: si.OverDepth(base, gamma=lambda t: last * t).raise_if_out_of_range(EYE, times)
    )
    np.testing.assert_array_equal(checked(jnp.asarray(1.0)), EYE)
    check = eqx.filter_jit(lambda c: check_parameters(si.ResidualFeedForward(0.5, 1.0, c)).c_minus)
    for call, name in ((lambda: checked(jnp.asarray(1.2)), "gamma"), (lambda: check(jnp.asarray(np.nan)), "c_minus")):
        with pytest.raises(Exception, match=f"{name}: out of range, or NaN"):  # noqa: B017, PT011
            call()
