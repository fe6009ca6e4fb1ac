import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, assert_mean, mean_and_error
from scipy.special import loggamma
from scipy.stats import norm

import sdeinfer as si
from sdeinfer.diagnostics import _agreement, agreement
from sdeinfer.diagnostics._agreement import BATCHES, _compare, _with_groups
from sdeinfer.diagnostics._rate import fit_rate

LINEAR = si.ShapedMLP(c_plus=0.0, c_minus=0.0)


def exact_distances(width: int, depth: int) -> tuple[float, float]:
    """W and D² between Σ log(χ²_n/n) over d layers and N(−T, 2T): the deep linear network's log V, one token.

    The difference of the distribution functions has the Fourier transform i (φ_n − φ)/u.
    """
    T = depth / width
    u = np.linspace(1e-6, 30, 6001)
    log_phi = depth * (loggamma(width / 2 + 1j * u) - loggamma(width / 2) + 1j * u * np.log(2 / width))
    difference = np.exp(log_phi) - np.exp(-1j * u * T - T * u**2)
    x = np.linspace(-T - 10, -T + 8, 900)
    parts = [np.trapezoid((1j * difference / u * np.exp(-1j * u * at)).real, u) / np.pi for at in x]
    scale = np.sqrt(2 * T)
    return (
        float(np.trapezoid(np.abs(parts), x) / scale),
        float(2 * np.sqrt(np.pi) / scale * np.trapezoid(np.abs(difference / u) ** 2, u) / np.pi),
    )


def shifted_normals(rng, shift: float, count: int) -> dict[str, np.ndarray]:
    """What is measured of two samples of normals, one shifted."""
    paths = rng.normal(size=(count, 1))
    return _compare(paths, [shift + rng.normal(size=(count, 1))], paths.dtype)[0]


@pytest.fixture(scope="module")
def linear():
    return agreement(LINEAR, jnp.eye(1), time=0.5, widths=[4, 16], networks=20_000, step=0.02, key=jr.key(7))


def test_deep_linear_networks_are_as_far_from_the_sde_as_sums_of_log_chi_squares(linear):
    exact = np.array([exact_distances(width, width // 2) for width in (4, 16)])
    log_volume = linear.sel(quantity="log_eigenvalue[0]")
    assert_estimate(log_volume["squared"], exact[:, 1], log_volume["squared_error"])
    # Noise adds to W, by its floor at most.
    W, error, floor = (log_volume[name].values for name in ("distance", "distance_error", "floor"))
    assert_estimate(W, np.clip(W, exact[:, 0], exact[:, 0] + floor), error)


def test_exact_distances_vanish_as_one_over_the_width():
    near, far = exact_distances(200, 100), exact_distances(400, 200)
    np.testing.assert_allclose(near[0] / far[0], 2, rtol=0.01)
    np.testing.assert_allclose(near[1] / far[1], 4, rtol=0.01)


def test_table_says_what_was_compared(linear):
    assert list(linear["quantity"].values) == ["log_eigenvalue[0]", "log_eigenvalues", "overall"]
    assert list(linear["depth"].values) == [2, 8]
    assert linear.attrs | {"paths": 20_000, "exploded": 0, "architecture": "mlp"} == linear.attrs
    xr_alone = linear["squared"].sel(quantity="log_eigenvalue[0]")
    np.testing.assert_array_equal(xr_alone, linear["squared"].sel(quantity="overall"))


def test_single_precision_and_a_width_whose_depth_is_rounded():
    V0 = si.equicorrelated(tokens=2, correlation=0.3).astype(jnp.float32)
    found = agreement(LINEAR, V0, time=0.5, widths=[5], networks=[60], step=0.1, key=jr.key(0))
    assert found["depth"].item() == 2
    np.testing.assert_allclose(found["time"], 2 / 5)
    singles = ["rho[0,1]", "log_eigenvalue[0]", "log_eigenvalue[1]"]
    assert list(found["quantity"].values) == [*singles, "correlations", "log_eigenvalues", "overall"]
    np.testing.assert_allclose(found["squared"].sel(quantity="overall"), found["squared"].sel(quantity=singles).mean())
    assert np.isfinite(found["squared_error"]).all()
    assert found["rate"].isnull().all()
    assert found.attrs["paths"] == 60


def test_floor_is_what_equal_laws_show_and_falls_as_the_root_of_the_sample():
    rng = np.random.default_rng(0)
    x = np.linspace(-9, 9, 4001)
    spread = np.trapezoid(np.sqrt(norm.cdf(x) * norm.sf(x)), x)
    for count, replicates in ((5000, 40), (50_000, 20)):
        found = [shifted_normals(rng, 0.0, count) for _ in range(replicates)]
        expected = np.sqrt(2 / np.pi) * np.sqrt(2 / count) * spread
        assert_mean(np.array([f["distance"][0] for f in found]) / expected, 1)
        # The standard deviation of 50 parts is 1 − 1/(4 · 49) of what it estimates.
        assert_mean(np.array([f["floor"][0] for f in found]) / (1 - 1 / (4 * (BATCHES - 1))) / expected, 1)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0])
def test_squared_distance_has_no_floor_and_its_error_bar_is_right(shift):
    rng = np.random.default_rng(1)
    x = np.linspace(-9, 9, 4001)
    exact = 2 * np.sqrt(np.pi) * np.trapezoid((norm.cdf(x - shift) - norm.cdf(x)) ** 2, x)
    found = [shifted_normals(rng, shift, 2000) for _ in range(60)]
    squared = np.array([f["squared"][0] for f in found])
    assert_mean(squared, exact)
    without = np.array([f["squared_without"][0] for f in found])
    jackknife = ((BATCHES - 1) * without.var(axis=1)).mean()
    variance, error = mean_and_error((squared - squared.mean()) ** 2)
    # The jackknife shows twice the variance of what is all noise, and the variance of what is all signal.
    twice = 2 * (BATCHES - 1) / (BATCHES - 2)
    assert_estimate(
        variance, jackknife / twice if shift == 0 else np.clip(variance, jackknife / twice, jackknife), error
    )


def test_rate_is_exact_without_noise():
    widths = 2.0 ** np.arange(4, 12)
    squared = (1.7 * widths**-0.8) ** 2
    rate, error, constant = fit_rate(widths, squared, np.tile(squared[:, None], BATCHES), 1e-3 * squared)
    np.testing.assert_allclose([rate, constant], [0.8, 1.7], rtol=1e-3)
    assert 0 < error < 0.2


def test_widths_drowned_in_noise_do_not_bias_the_rate():
    rng = np.random.default_rng(2)
    widths = 2.0 ** np.arange(4, 12)
    exact, error = widths**-2, np.full(8, 0.04 / 16**2)
    fits = []
    for _ in range(100):
        parts = exact[:, None] + np.sqrt(BATCHES) * error[:, None] * rng.normal(size=(8, BATCHES))
        without = (parts.sum(axis=1, keepdims=True) - parts) / (BATCHES - 1)
        fits.append(fit_rate(widths, parts.mean(axis=1), without, error))
    rate, spread, _ = np.array(fits).T
    assert_mean(rate, 1)
    # The error bar leaves room for the next order, of which there is none here.
    assert np.std(rate) < spread.mean()


def test_nothing_but_noise_has_no_rate():
    squared = np.array([1e-5, -2e-5, 0.5e-5])
    assert np.isnan(fit_rate(np.array([16, 32, 64]), squared, np.tile(squared[:, None], 50), np.full(3, 1e-5))).all()


def test_correlations_that_vary_by_rounding_only_are_left_out():
    rng = np.random.default_rng(3)
    paths = np.stack([np.full(100, 1.0), rng.normal(size=100), rng.normal(size=100)], axis=1)
    paths[::2, 0] -= 1e-7
    found = _compare(paths, [paths], np.dtype(np.float32))[0]
    names, measured = _with_groups(2, {name: values[:, None] for name, values in found.items()})
    table = dict(zip(names, measured["distance"][:, 0], strict=True))
    assert np.isnan([table["rho[0,1]"], table["correlations"]]).all()
    assert table["overall"] == table["log_eigenvalues"] == 0


def test_exploded_paths_are_left_out_and_counted_and_refused_where_they_are_many(monkeypatch, key):
    def paths_of_which_explode(few):
        V = np.tile(np.eye(2), (4000, 1, 1, 1))
        V[:few] = np.inf
        monkeypatch.setattr(_agreement, "simulate", lambda *_, **__: V)
        return _agreement._paths(LINEAR, np.eye(2), 0.5, paths=4000, step=0.1, key=key)

    quantities, lost = paths_of_which_explode(4)
    assert lost == 4
    assert len(quantities) == 3996
    with pytest.raises(si.InputError, match="time: 5 of the SDE's 4000 paths explode before 0.5"):
        paths_of_which_explode(5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"V0": jnp.ones((2, 2))}, "V0: singular"),
        ({"V0": jnp.array([[1.0, 2.0], [2.0, 1.0]])}, "V0: not positive"),
        ({"widths": [3, 8]}, "width: 2 tokens need a width of at least 4, got 3"),
        ({"widths": [8, 8]}, "widths: increasing whole numbers"),
        ({"widths": []}, "widths: increasing whole numbers"),
        ({"widths": [8.0, 16.0]}, "widths: increasing whole numbers"),
        ({"time": 0.01}, "time: 0.01 is no more than half a layer of width 8"),
        ({"time": -1.0}, "time: must be positive"),
        ({"networks": 1}, "networks: at least 50 are needed for error bars, got 1"),
        ({"networks": [50, 60, 70]}, "networks: one whole number, or one for each of 2 widths"),
        ({"paths": 10}, "paths: at least 50 are needed, got 10"),
        ({"step": 0.0}, "step: must be positive"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_in_one_line(changed, message):
    call = {"layer": LINEAR, "V0": jnp.eye(2), "time": 0.5, "widths": [8, 16], "networks": 50} | changed
    with pytest.raises(si.InputError, match=message) as error:
        agreement(call.pop("layer"), call.pop("V0"), **call, key=jr.key(0))
    assert "\n" not in str(error.value)


TRANSFORMERS = {"c₊ + c₋ = 0": (0.9, -0.9), "c₊ + c₋ = −1.2": (0.3, -1.5)}
WIDTHS = [16, 32, 64, 128, 256, 512, 1024, 2048]
NETWORKS = [500_000, 500_000, 300_000, 150_000, 50_000, 10_000, 4000, 2000]


@pytest.mark.slow
@pytest.mark.parametrize("slopes", TRANSFORMERS)
def test_distance_of_transformers_to_the_sde_over_the_width(slopes, key):
    """Run with `-m slow -s` to see the table: some minutes on two cores.

    In single precision, as networks run. With norms of 0.7 the logits' sd max V/(τ0 √n) starts at 0.15 at n = 16; with
    norms of 1, 0.8 % of the SDE's paths explode before T.
    """
    c_plus, c_minus = TRANSFORMERS[slopes]
    layer = si.ShapedTransformer(gamma=0.5, tau0=0.8, c_plus=c_plus, c_minus=c_minus)
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=0.7).astype(jnp.float32)
    found = agreement(layer, V0, time=0.5, widths=WIDTHS, networks=NETWORKS, key=key)
    for group in ("correlations", "log_eigenvalues", "overall"):
        rows = found.sel(quantity=group)
        print(f"\n{slopes}, {group}: rate {rows['rate']:.2f} ± {rows['rate_error']:.2f}")
        columns = ["distance", "distance_error", "floor", "squared", "squared_error"]
        print(rows[columns].to_dataframe().drop(columns="quantity").to_string(float_format="{:.2e}".format), end="")
    rates = found[["rate", "rate_error"]].to_dataframe()
    # The He constant moves the ReLU's drift by (c₊ + c₋)/√n: correlations follow, eigenvalues hardly do.
    full = ["log_eigenvalues"] if c_plus + c_minus else ["log_eigenvalues", "correlations", "overall"]
    assert_estimate(rates["rate"][full], 1, rates["rate_error"][full])
    if c_plus + c_minus:
        # Of A (c₊ + c₋)/√n + B/n the terms cancel here: the rate comes to ½ from below.
        rate, error = rates.loc["correlations"]
        assert_estimate(rate, min(rate, 0.5), error)
