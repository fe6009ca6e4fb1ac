"""Tokens that tell a parameter, and how many networks of them."""

import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, assert_holds

import sdeinfer as si
from sdeinfer.diagnostics import _design
from sdeinfer.diagnostics._design import _networks, _sample, marginal_information
from sdeinfer.infer import innovations, law_at, logit_scale
from sdeinfer.likelihood import observed_path
from sdeinfer.observation import covariance_dataset

LAYER = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
NAMES = ("gamma", "tau0", "c_gap", "c_mean")
SIZES = {"width": 128, "depth": 16}


@pytest.fixture(scope="module")
def designed():
    """Every other size is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_design, "SIZES", _design.SIZES[::2])
        return si.design(LAYER, tokens=3, **SIZES, relative_sd=0.05, key=jr.key(1))


def needed(V0) -> float:
    """Networks with these tokens that tell τ0 to 5 %."""
    sampled = _sample(LAYER, si.Architecture("transformer"), np.asarray(V0), jr.key(1), **SIZES)
    return _networks(sampled, NAMES, "tau0", 0.05) or np.inf


def test_fewer_networks_than_of_other_tokens(designed):
    """The others are uncorrelated with one spread of the logits, or these tokens at other sizes."""
    plain = si.equicorrelated(tokens=3, correlation=0.0)
    assert needed(designed.V0) == designed.networks
    assert needed(plain * _spread(designed.V0) / _spread(plain)) >= designed.networks
    assert min(needed(size * designed.V0) for size in (0.5, 2.0)) > designed.networks


def test_as_many_networks_as_the_precision_takes(designed):
    """More than the information of all layers alone asks for: layers beyond the range are left out."""
    data = si.sample_networks(LAYER, designed.V0, **SIZES, networks=40, key=jr.key(5))
    path = observed_path(data)
    law = law_at(
        si.Architecture("transformer"), LAYER.coordinates.unconstrained(LAYER.parameters()), widths=np.array([128.0])
    )
    information = sum(here.information for here in innovations(path, law)) * designed.networks / 40
    alone = 1 / np.sqrt(marginal_information(information, NAMES)[1])
    assert 0.5 * designed.expected["tau0"] < alone < designed.expected["tau0"]
    assert 0.049 < designed.expected["tau0"] <= 0.05


@pytest.mark.slow
def test_better_precision_takes_more_networks_of_smaller_tokens(designed):
    finer = si.design(LAYER, tokens=3, **SIZES, relative_sd=0.01, key=jr.key(1))
    assert finer.networks > 25 * designed.networks
    assert _spread(finer.V0) < _spread(designed.V0)


def test_the_gap_is_known_no_better_than_the_mean_of_the_slopes(designed):
    """q = δ²/(s̄² + δ²): the prior's √2 of (c₊ + c₋)/2 is 2√2/√n of log δ; a little less, for what q is at c₊ + c₋."""
    assert 0.9 < designed.expected["c_gap"] * np.sqrt(SIZES["width"] / 2) < 1.2


def test_the_plan_is_one_for_all_keys(designed, monkeypatch):
    """The tokens are equal; the numbers of networks are estimates. Tried are the best of the sizes and the next."""
    spread = _spread(designed.V0) / _design.SPREAD
    monkeypatch.setattr(_design, "SIZES", spread * np.array([1.0, _design.SIZES[1] / _design.SIZES[0]]))
    other = si.design(LAYER, tokens=3, **SIZES, relative_sd=0.05, key=jr.key(2))
    np.testing.assert_allclose(other.V0, designed.V0, rtol=1e-12)
    assert 0.85 < other.networks / designed.networks < 1.15


def test_designed_numbers_belong_together(designed):
    np.testing.assert_allclose(designed.norms**2, np.diag(designed.V0))
    np.testing.assert_allclose(np.diag(designed.correlations), 1.0)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (LAYER, {"parameter": "c_plus"}, "parameter: must be one of gamma, tau0, c_gap, got 'c_plus'"),
        (si.ShapedMLP(1.0, -1.0), {}, "parameter: must be one of c_gap"),
        (LAYER, {"relative_sd": 0.0}, "relative_sd: must be positive, got 0"),
        (si.Stack((si.ShapedMLP(1.0, -1.0),)), {}, "layer: must be one of the named architectures"),
        (
            si.ShapedMLP(1.0, -1.0),
            {"parameter": "c_gap", "tokens": 1},
            "no number of networks of width 128 determines c_gap to 0.05",
        ),
        (si.ShapedAttention(0.5, 1.0), {"tokens": 1}, "attention has tau0, which one token cannot identify"),
    ],
)
def test_what_cannot_be_designed_is_refused(layer, options, message):
    with pytest.raises(si.InputError, match=message):
        si.design(layer, **({"tokens": 2} | SIZES | options), key=jr.key(0))


@pytest.mark.slow
def test_fits_have_the_precision_of_the_plan(designed):
    """In the mean over data sets, whose relative standard deviations of τ0 scatter by .003."""
    found = []
    for number in range(4):
        data = si.sample_networks(LAYER, designed.V0, **SIZES, networks=designed.networks, key=jr.key(10 + number))
        tau0 = si.fit(si.models.full_path, data, key=jr.key(4))["posterior"]["tau0"].values
        found.append(tau0.std() / tau0.mean())
        assert_holds(tau0, 1)
    print(f"\n{designed.networks} networks: {np.round(found, 4)}")
    assert_estimate(np.mean(found), designed.expected["tau0"], 0.003 / np.sqrt(len(found)))


def _spread(V) -> float:
    path = np.stack([np.asarray(V), 2 * np.asarray(V)])[None]
    return float(logit_scale(covariance_dataset(path, width=SIZES["width"], layers=[0, 1]))[0, 0])
