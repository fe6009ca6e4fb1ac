from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.internals import check_parameters

import sdeinfer as si

GOOD: dict[str, Any] = {"gamma": 0.5, "tau0": 1.0, "c_plus": 0.0, "c_minus": -1.0}


TRANSFORMER = {
    r"gamma: must be in \(0, 1\], got 1.1": {"gamma": np.array([0.5, 1.1])},
    r"gamma: must be in \(0, 1\], got nan": {"gamma": float("nan")},
    r"gamma: a scalar or one value for each network is needed, got the shape \(2, 1\)": {
        "gamma": jnp.full((2, 1), 0.5)
    },
    "gamma: a real scalar is needed, got": {"gamma": 0.5 + 0.1j},
    "tau0: must be greater than 0 and finite, got 0": {"tau0": 0.0},
    "c_plus: must be finite, got inf": {"c_plus": float("inf")},
    "key_width: a whole number of at least 1 is needed, got 0": {"key_width": 0},
    "heads: a whole number of at least 1 is needed, got 0": {"heads": 0},
    "expansion: must be positive and finite, got 0": {"expansion": 0},
}
ONES = jnp.ones((2, 16))
ATTENTION, MLP = si.ShapedAttention(0.5, 1.0), si.ShapedMLP(0.1, -0.1)


def with_ratio(expansion: float):
    return lambda: si.ResidualFeedForward(0.5, 0.0, 0.0, expansion=expansion).forward(ONES, key=jr.key(0))


REFUSALS = {
    **{message: lambda new=new: si.ShapedTransformer(**GOOD | new) for message, new in TRANSFORMER.items()},
    "key_width: a whole .* got 0$": lambda: si.ShapedAttention(gamma=0.5, tau0=1.0, key_width=0),
    "gamma1: must be finite, got nan": lambda: si.ShapedAttention(0.5, 1.0, gamma1=np.nan),
    "heads: the width 16 is not a multiple of 3": lambda: si.ShapedAttention(0.5, 1.0, heads=3).forward(
        ONES, key=jr.key(0)
    ),
    "expansion: times the width 16 must be a whole number, got 2.66": with_ratio(8 / 3),
    "expansion: times the width 16 must be a whole number, got 0.01": with_ratio(0.01),
    "layers: at least one is needed, got none": lambda: si.Stack(()),
    "pattern: layers of attention with different patterns have no limit in common": lambda: si.Stack(
        (ATTENTION, si.ShapedAttention(0.5, 1.0, pattern=si.CAUSAL))
    ).limit(),
    "law: 'finite-width' supports attention": lambda: si.Stack((MLP, ATTENTION)).finite_width(64),
    "law: 'finite-width' .* use law='limit'": lambda: si.Stack((ATTENTION, MLP, MLP)).finite_width(64),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()


@pytest.mark.parametrize("gain", ["gamma1", "gamma2"])
def test_gains_have_a_limit_at_one_only(gain):
    layer = si.ShapedAttention(0.5, 1.0, **{gain: 0.9})
    with pytest.raises(ValueError, match=rf"{gain}: there is a limit for 1 only, where A tends to I .* got 0.9"):
        layer.limit()
    with pytest.raises(ValueError, match=f"{gain}: there is a limit for 1 only"):
        si.simulate(layer, jnp.eye(2), [0.1], paths=2, key=jr.key(0))
    with pytest.raises(eqx.EquinoxRuntimeError, match=f"{gain}: there is a limit for 1 only"):
        eqx.filter_jit(lambda layer: layer.limit())(layer).linear_noise.block_until_ready()
    one, other = (
        layer.limit() for layer in (si.ShapedAttention(0.5, 1.0), si.ShapedAttention(0.5, 1.0, **{gain: 1.0}))
    )
    assert one == other


def test_a_ratio_of_widths_may_be_a_fraction(key):
    layer = si.ResidualFeedForward(0.5, 0.0, 0.0, expansion=8 / 3)
    assert eqx.filter_eval_shape(layer.forward, jnp.ones((2, 96)), key=key).shape == (2, 96)


def test_integers_become_floating_point():
    layer = si.ShapedAttention(gamma=1, tau0=2)
    assert layer.gamma.dtype == layer.tau0.dtype == jnp.float64


def test_parameters_carry_their_public_names():
    layer = si.ShapedTransformer(**GOOD)
    assert {name: float(value) for name, value in layer.parameters().items()} == GOOD
    assert list(si.Stack((layer, si.ShapedMLP(0.0, 1.0))).parameters()) == [
        *(f"transformer.{name}" for name in GOOD),
        "mlp.c_plus",
        "mlp.c_minus",
    ]
    attention = si.ShapedAttention(0.5, 1.0)
    assert list(si.Stack((attention, attention)).parameters()) == [
        f"{part}.{name}" for part in ("attention", "attention_2") for name in ("gamma", "tau0")
    ]


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.1), ("tau0", 0.0), ("c_plus", jnp.nan)])
def test_a_traced_parameter_out_of_range_raises_at_run_time(name, value):
    @eqx.filter_jit
    def drift(value):
        layer = check_parameters(si.ShapedTransformer(**(GOOD | {name: value})))
        return layer.limit().drift(jnp.eye(2))

    drift(jnp.array(GOOD[name]))
    with pytest.raises(eqx.EquinoxRuntimeError, match=f"{name}.*out of range"):
        drift(jnp.array(value)).block_until_ready()


def test_a_traced_parameter_inside_a_stack_is_checked_too():
    @eqx.filter_jit
    def coefficient(tau0):
        return check_parameters(si.Stack((si.ShapedAttention(0.5, tau0),))).limit().attention_drift

    with pytest.raises(eqx.EquinoxRuntimeError, match=r"attention.tau0.*out of range"):
        coefficient(jnp.array(-1.0)).block_until_ready()


def test_a_layer_prints_its_values_and_its_sizes():
    layer = si.ShapedAttention(gamma=0.5, tau0=np.float64(1.25), heads=4)
    assert str(layer) == "ShapedAttention(gamma=0.5, tau0=1.25, heads=4)"
    assert str(si.Stack([layer])) == "Stack(attention.gamma=0.5, attention.tau0=1.25)"
    traced = jax.eval_shape(lambda gamma: {str(si.ShapedAttention(gamma, 1.0)): gamma}, 0.5)
    assert list(traced) == ["ShapedAttention(gamma=traced, tau0=traced)"]
