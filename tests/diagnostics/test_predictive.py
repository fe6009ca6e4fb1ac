"""Networks against predictions of them, on predictions whose law is known."""

import numpy as np
import pytest
import xarray as xr
from helpers.internals import of_draws, of_predictions
from helpers.spending import share
from matplotlib import pyplot
from scipy import stats

import sdeinfer as si
from sdeinfer.diagnostics import distance_from_theory, left_out_transforms
from sdeinfer.report import figures

DRAWS, NETWORKS, TOKENS, WIDTH = 60, 200, 3, 24


def wisharts(rng, *shape):
    X = rng.normal(size=(*shape, TOKENS, WIDTH))
    return X @ np.swapaxes(X, -1, -2) / WIDTH


def tree(scale: float = 1.0, log_likelihood=None) -> xr.DataTree:
    """Networks and predictions of one law, the former times a number."""
    rng = np.random.default_rng(0)
    observed = scale * wisharts(rng, NETWORKS, 1)
    predicted = wisharts(rng, DRAWS, NETWORKS, 1)
    if log_likelihood is None:
        log_likelihood = rng.normal(size=(2, DRAWS, NETWORKS)) * 0.1
    return tree_of(observed, predicted, log_likelihood)


def tree_of(observed, predicted, log_likelihood) -> xr.DataTree:
    """Covariances after layer 4, of networks and of one chain of predictions."""
    dims, coords = ("network", "layer", "token_a", "token_b"), {"layer": [4], "network": np.arange(len(observed))}
    covariances = {
        "observed_data": (dims, observed),
        "posterior_predictive": (("chain", "draw", *dims), predicted[None]),
    }
    groups = {name: xr.Dataset({"covariance": each}, coords=coords) for name, each in covariances.items()}
    groups["log_likelihood"] = xr.Dataset({"covariance": (("chain", "draw", "network"), log_likelihood)})
    return xr.DataTree.from_dict(groups)


def test_transforms_of_one_law_are_uniform():
    transforms = left_out_transforms(tree())
    assert list(transforms.columns) == ["largest log-eigenvalue", "smallest log-eigenvalue", "mean correlation"]
    for name in transforms:
        assert stats.kstest(transforms[name], "uniform").pvalue >= share()


def test_another_law_is_seen():
    left_out, _ = of_predictions(tree(scale=1.5)).verdicts
    assert left_out.value < 1e-6
    assert "log-eigenvalue after the last layer varies between networks otherwise" in left_out.advice
    assert stats.kstest(left_out_transforms(tree(scale=1.5))["mean correlation"], "uniform").pvalue > 1e-4


def test_a_draw_that_lives_by_one_network_does_not_count_for_it():
    """A likelihood that one draw makes large for a network by far has no weight without it."""
    log_likelihood = 0.01 * np.random.default_rng(1).normal(size=(1, DRAWS, NETWORKS))
    log_likelihood[0, :30] += 3.0
    data = tree(log_likelihood=log_likelihood)
    found = left_out_transforms(data)["mean correlation"].iloc[0]
    V = data["posterior_predictive"]["covariance"].values[0, :, 0, 0]
    rho = _mean_correlation(V)
    seen = _mean_correlation(data["observed_data"]["covariance"].values[0])
    weights = np.exp(-log_likelihood[0, :, 0])
    expected = ((rho < seen) * weights).sum() / weights.sum()
    assert abs(found - expected) < 0.05


def test_a_network_of_which_nothing_was_used_weighs_all_draws_alike():
    log_likelihood = 0.1 * np.random.default_rng(2).normal(size=(2, DRAWS, NETWORKS))
    log_likelihood[..., 3] = 0.0
    transforms, plain = left_out_transforms(tree(log_likelihood=log_likelihood)), left_out_transforms(tree())
    assert np.isfinite(transforms).all(axis=None)
    alike = left_out_transforms(tree(log_likelihood=np.zeros_like(log_likelihood)))
    np.testing.assert_array_equal(transforms.iloc[3], alike.iloc[3])
    assert not (transforms.iloc[4] == plain.iloc[4]).all()


def test_distances_are_about_their_floor_and_grow_with_a_shift():
    table, far = distance_from_theory(tree()), distance_from_theory(tree(scale=1.5))
    assert (table["wasserstein"] < 3 * table["floor"]).all()
    assert far.loc["largest log-eigenvalue", "wasserstein"] > 5 * far.loc["largest log-eigenvalue", "floor"]


def of_one_token(observed, predicted) -> xr.DataTree:
    """Networks and predictions of one token, by its log norms."""
    seen, drawn = (np.exp(x)[..., None, None, None] for x in (observed, predicted))
    return tree_of(seen, drawn, np.zeros((1, len(predicted), len(observed))))


def test_the_floor_is_the_published_one():
    """√(1/n + 1/n′) √(2/π) ∫ √(F (1 − F)) dx, of a normal law (del Barrio, Giné & Matrán, 1999)."""
    x = stats.norm.ppf((np.arange(8000) + 0.5) / 8000)
    predicted = np.random.default_rng(1).permutation(x).reshape(4, 2000)
    at = np.linspace(-9, 9, 4001)
    integral = np.trapezoid(np.sqrt(stats.norm.cdf(at) * stats.norm.sf(at)), at)
    row = distance_from_theory(of_one_token(x[::4], predicted)).loc["largest log-eigenvalue"]
    np.testing.assert_allclose(row["floor"], np.sqrt(1 / 2000 + 1 / 8000) * np.sqrt(2 / np.pi) * integral, rtol=0.01)


@pytest.mark.parametrize("group", ["observed_data", "posterior_predictive"])
def test_exploded_networks_are_larger_than_all_others(group):
    data = tree()
    exploded = data[group].to_dataset()
    exploded["covariance"][..., 0, 0, :, :] = np.inf
    data[group] = exploded
    found = left_out_transforms(data)["largest log-eigenvalue"].iloc[0]
    assert (found > 0.98) if group == "observed_data" else (found < 0.02)


@pytest.mark.filterwarnings("error")
def test_predictions_that_all_explode_are_infinitely_far(fitted):
    """As of priors that are tight and wrong: the verdict says so, and no figure fails."""
    exploded = fitted.copy(deep=True)
    predicted = exploded["posterior_predictive"].to_dataset()
    predicted["covariance"][..., 1:, :, :] = np.nan
    exploded["posterior_predictive"] = predicted
    assert np.isposinf(distance_from_theory(exploded)["wasserstein"]).all()
    notes = [note for note in si.check(exploded).notes if note.startswith("distance from predictions")]
    (note,) = notes
    assert note.startswith("distance from predictions, floors inf: every prediction explodes before the last layer")
    latent = exploded.copy()
    latent.attrs = exploded.attrs | {"every_layer": 0.0}
    row = si.check(latent).to_frame().loc["distance from predictions, floors"]
    assert not row["passed"]
    assert set(figures(exploded)) >= {"correlation_paths", "terminal_correlation"}
    pyplot.close("all")


def test_equal_predictions_have_no_scale():
    data = tree()
    for group in ("observed_data", "posterior_predictive"):
        equal = data[group].to_dataset()
        equal["covariance"][...] = np.eye(TOKENS)
        data[group] = equal
    np.testing.assert_array_equal(distance_from_theory(data)["wasserstein"], 0.0)
    data["observed_data"] = tree()["observed_data"].to_dataset()
    np.testing.assert_array_equal(distance_from_theory(data)["wasserstein"], np.inf)


def test_singular_covariances_have_no_smallest_eigenvalue_to_compare():
    """Such as the sample covariances of fewer outputs than tokens."""
    data = tree()
    singular = data["observed_data"].to_dataset()
    X = np.random.default_rng(5).normal(size=(NETWORKS, 1, TOKENS, 2))
    singular["covariance"][...] = X @ np.swapaxes(X, -1, -2) / 2
    data["observed_data"] = singular
    assert list(distance_from_theory(data).index) == ["largest log-eigenvalue", "mean correlation"]
    assert np.isfinite(left_out_transforms(data)).all(axis=None)


def test_a_likelihood_that_is_zero_in_a_draw_has_the_least_weight():
    log_likelihood = 0.1 * np.random.default_rng(6).normal(size=(2, DRAWS, NETWORKS))
    log_likelihood[0, :3, 7] = -np.inf
    log_likelihood[..., 8] = -np.inf
    assert np.isfinite(left_out_transforms(tree(log_likelihood=log_likelihood))).all(axis=None)


def _mean_correlation(V):
    V = V.reshape(-1, TOKENS, TOKENS)
    norm = np.sqrt(np.einsum("nii->ni", V))
    rho = V / norm[:, :, None] / norm[:, None]
    return rho[:, *np.triu_indices(TOKENS, 1)].mean(axis=1)


@pytest.mark.parametrize(
    ("scale", "law", "failed"), [(1.0, "finite-width", 0), (1.5, "finite-width", 1), (1.5, "limit", 0)]
)
def test_networks_that_no_draw_predicts_fail(scale, law, failed):
    """Draws of half the scale beside those of the right one do not count against a fit."""
    data = tree(scale)
    predicted = data["posterior_predictive"].to_dataset().assign_attrs(law=law)
    predicted["covariance"][0, ::2] *= 0.5
    data["posterior_predictive"] = predicted
    found = of_draws(data).verdicts
    assert len(found) == failed
    assert all("largest log-eigenvalue" in each.advice for each in found)
    assert not of_draws(data.isel(network=slice(7))).verdicts


def test_weights_that_are_not_known_leave_the_distance(monkeypatch):
    """As where no Pareto law fits the tail of any network's weights."""
    unknown = np.full((DRAWS, NETWORKS), np.nan)
    monkeypatch.setattr("sdeinfer.diagnostics._predictive._left_out_weights", lambda post: unknown)
    (distance,) = of_predictions(tree()).verdicts
    assert distance.name == "distance from predictions, floors"
