"""Promises of tuning, measured on networks of several widths: exact chains and networks with weights."""

from typing import Any

import numpy as np
import pytest
from helpers.budget import assert_estimate

import sdeinfer as si
from sdeinfer import criteria as of

V0 = np.array([[1.0, 0.2, 0.1, 0.3], [0.2, 1.2, 0.25, 0.1], [0.1, 0.25, 0.8, 0.15], [0.3, 0.1, 0.15, 1.0]])
PLAIN = {"tau0": 1.0, "c_gap": 1.0}
CAUSAL = si.layers.template("transformer", pattern=si.CAUSAL)
GOALS = {
    "norms": ("transformer", "gamma", PLAIN, of.probability(of.NormFactor(), below=2) >= 0.95),
    "largest correlation": ("transformer", "gamma", PLAIN, of.quantile(of.LargestCorrelation(), 0.95) <= 0.7),
    "effective rank": ("transformer", "gamma", PLAIN, of.expectation(of.EffectiveRank()) >= 3),
    "range": ("transformer", "gamma", PLAIN, of.probability(of.RangeMargin(0.1, 4.0), above=0) >= 0.9),
    "causal": (CAUSAL, "gamma", PLAIN, of.probability(of.NormFactor(), below=2) >= 0.9),
    "spread": ("attention", "gamma", {"tau0": 1.0}, of.spread(of.LogNorm(1)) <= 0.4),
    "mean correlation": ("attention", "gamma", {"tau0": 0.5}, of.quantile(of.MeanCorrelation(), 0.95) <= 0.5),
    "alignment": ("feedforward", "gamma", {"c_gap": 4.0}, of.expectation(of.MeanCorrelation()) <= 0.4),
    "gap of 10": ("feedforward", "gamma", {"c_gap": 10.0}, of.expectation(of.MeanCorrelation()) <= 0.4),
    "slopes": ("mlp", "c_gap", {}, of.expectation(of.MeanCorrelation()) <= 0.25),
    "gradients": ("transformer", "gamma", PLAIN, of.probability(of.GradientFactor(), below=2) >= 0.9),
}
WIDTHS, DEPTHS = (64, 128, 256, 512), {"slopes": 16}
NETWORKS = {64: 200, 128: 200, 256: 200, 512: 64}
"""Networks with weights; 200 of width 512 take minutes for each goal."""


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GOALS)
def test_networks_keep_what_is_promised(name, width, key, record):
    """The criterion on 4,000 other chains and on networks with weights is what is promised by the law of width n.

    The promise of the limit is printed beside it.
    """
    kind, free, fixed, goal = GOALS[name]
    sizes, zs = {"width": width, "depth": DEPTHS.get(name, 64)}, {}
    for law in ("limit", "finite-width"):
        tuned = si.tune(kind, V0, **sizes, maximise=free, subject_to=[goal], fixed=fixed, law=law, key=key)
        weights, depths = NETWORKS[width] if law == "finite-width" else 0, [sizes["depth"]]
        settings: dict[str, Any] = {"networks": 4000, "with_weights": weights}
        row = si.transfer(tuned, widths=[width], depths=depths, **settings, key=key).criteria.iloc[0]
        value, error = tuned.criteria[["value", "error"]].iloc[0]
        found = [f"{name}, n = {width}, {law}: {free} = {tuned.values[free]:.4f}; {goal}: {value:.4f} ± {error:.4f}"]
        for source in ("promised", "chain", "weights"):
            z = (row[source] - value) / np.hypot(error, row[f"{source}_error"])
            zs[law, source] = "" if np.isnan(z) else f"{z:.1f}"
            found.append(f"{source} {row[source]:.4f} ± {row[f'{source}_error']:.4f}, z = {z:.1f}")
            # Gradients have the limit's law, which is good enough at the larger widths.
            if np.isfinite(row[source]) and law == "finite-width":
                assert_estimate(row[source], value, np.hypot(error, row[f"{source}_error"]))
        print("\n" + "; ".join(found))
        assert law == "limit" or np.isfinite(row["weights"])
    places = (("limit", "chain"), ("finite-width", "chain"), ("finite-width", "weights"))
    record("promises_of_tuning", {f"{name}, n = {width}": [zs[place] for place in places]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"widths": []}, "widths: positive numbers are needed"),
        ({"depths": [0]}, "depths: positive numbers are needed"),
        ({"networks": 1}, "networks: at least 2"),
    ],
)
def test_bad_sizes_are_refused(tuned, changed, message, key):
    arguments = {"widths": [16], "depths": [2], "networks": 2, "with_weights": 0, "key": key} | changed
    with pytest.raises(si.InputError, match=message) as caught:
        si.transfer(tuned, **arguments)
    assert "\n" not in str(caught.value)
