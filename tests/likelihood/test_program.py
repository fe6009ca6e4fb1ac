"""Programs of users: sites of several numbers, further observations, plates, mixtures."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_stats.base import array_stats
from helpers.budget import assert_estimate
from helpers.internals import identified_of
from likelihood.programs import NETWORKS, SHORT, density
from matplotlib import pyplot
from numpyro import handlers
from numpyro.distributions.transforms import OrderedTransform, StickBreakingTransform
from numpyro.infer import HMCECS, MCMC, NUTS, BarkerMH
from numpyro.infer.reparam import ExplicitReparam

import sdeinfer as si
from sdeinfer.likelihood import CovariancePath
from sdeinfer.observation import read_posterior
from sdeinfer.report import figures, summary

FULL_PATH, EACH = si.models.full_path, si.models.each_network


def law(gamma, path):
    return CovariancePath(si.ResidualFeedForward(gamma=gamma, c_plus=1.0, c_minus=-1.0), path)


@jax.jit
def log_prob(path):
    """Log densities of networks at γ = ½."""
    return law(0.5, path).log_prob(path.observed)


@si.models.each_network
def several(path):
    """As many numbers in one site as there are networks, which are of no network; and further observations."""
    w = numpyro.sample("w", dist.Normal(0, 0.1).expand([NETWORKS]).to_event(1))
    with numpyro.plate("halves", 2):
        half = numpyro.sample("half", dist.Normal())
    gamma = numpyro.deterministic("gamma", jax.nn.sigmoid(half.sum() + w.sum()))
    numpyro.sample("y", dist.Normal(gamma, 0.1), obs=0.6)
    with numpyro.plate("observations", 3):
        numpyro.sample("z", dist.Normal(gamma, 0.1), obs=jnp.array([0.5, 0.6, 0.7]))
    with numpyro.plate("net", path.networks):
        effect = numpyro.sample("effect", dist.Normal(0, 0.1))
        numpyro.sample("V", law(gamma * jnp.exp(-(effect**2)), path), obs=path.observed)


@pytest.fixture(scope="module")
def post(data):
    return si.fit(several, data, **SHORT)


def test_axes_are_those_of_plates_and_further_observations_have_their_densities(post, data):
    dims = {name: values.dims[2:] for name, values in post["posterior"].data_vars.items()}
    assert dims == {"effect": ("network",), "gamma": (), "half": ("half_dim_0",), "w": ("w_dim_0",)}
    dims = {name: values.dims[2:] for name, values in post["log_likelihood"].data_vars.items()}
    assert dims == {"covariance": ("network",), "y": (), "z": ("z_dim_0",)}
    np.testing.assert_array_equal(post["log_likelihood"]["network"], data["network"])
    gamma = post["posterior"]["gamma"].values
    expected = dist.Normal(gamma[..., None], 0.1).log_prob(np.array([0.5, 0.6, 0.7]))
    np.testing.assert_allclose(post["log_likelihood"]["z"], expected, rtol=1e-10)


def test_sites_of_several_numbers_are_checked_number_by_number(post):
    names = ["half[0]", "half[1]", *(f"w[{number}]" for number in range(NETWORKS))]
    assert identified_of(post) == names
    table = si.summarise(post)
    assert list(table.index) == [*names, "gamma", "c_gap", "c_plus", "c_minus"]
    np.testing.assert_allclose(table.loc["w[3]", "mean"], post["posterior"]["w"][..., 3].mean())
    found = si.check(post)
    assert set(found.unidentified) & set(names[2:])  # they are known only in their sum, and hardly by it
    assert "these data do not identify" in str(found) or not found.passed
    assert {"w[0] contraction", "half[1] contraction"} <= set(found.to_frame().index)
    assert set(summary(post, found)["parameters"]) == set(table.index)  # pyright: ignore
    assert set(figures(post)) == {"posterior", "correlation_paths", "terminal_correlation", "innovations", "ranks"}
    pyplot.close("all")


def test_what_a_program_fixes_is_fixed(post):
    """c₊ and c₋ are constants of the program, and no parameters that could move."""
    assert {name: value for name, value in post.attrs.items() if name.startswith("fixed_")} == {
        "fixed_c_gap": pytest.approx(2.0),
        "fixed_c_mean": pytest.approx(0.0),
    }


def in_plate(size, *, outer=None):
    def program(path):
        gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
        with contextlib.nullcontext() if outer is None else numpyro.plate("outer", outer, dim=-2):
            with numpyro.plate("network", size, dim=-1):
                numpyro.sample("covariance", law(gamma, path), obs=path.observed)

    return program


def of_covariate(path):
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
    numpyro.sample("V", law(gamma ** jnp.arange(1, 1 + NETWORKS), path), obs=path.observed)


def with_noise(path):
    own_plate(path)
    with numpyro.plate("others", path.networks):
        numpyro.sample("noise", dist.Normal())


def own_plate(path, **settings):
    gamma = numpyro.sample("gamma", dist.Beta(2, 2))
    with numpyro.plate("network", path.networks):
        numpyro.sample("V", law(gamma, path), **{"obs": path.observed} | settings)


def masked(path):
    gamma = numpyro.sample("gamma", dist.Beta(2, 2))
    with numpyro.plate("network", path.networks):
        here = law(gamma, path).mask(jnp.arange(path.networks) < 2)
        numpyro.sample("covariance", here, obs=path.observed)


def some_of(path):
    gamma, some = numpyro.sample("gamma", dist.Beta(2, 2)), path[jnp.array([0, 2])]
    numpyro.sample("V", law(gamma, some), obs=some.observed)


def mixture(path):
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1).expand([2]).to_event(1))
    with numpyro.plate("network", path.networks):
        parts = [law(gamma[0], path), law(gamma[1], path)]
        numpyro.sample("covariance", dist.MixtureGeneral(dist.Categorical(jnp.full(2, 0.5)), parts), obs=path.observed)


def by_factor(path):
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1).expand([2]).to_event(1))
    each = jnp.stack([law(value, path).log_prob(path.observed) for value in gamma])
    with numpyro.plate("network", path.networks):
        numpyro.factor("marginal", jax.nn.logsumexp(each, axis=0) - jnp.log(2))


@pytest.mark.long
def test_a_mixture_is_fitted_without_what_needs_a_layer(data, tmp_path):
    post = si.fit(EACH(mixture), data, law="limit", **SHORT)
    path = si.prepare(EACH(mixture), data, law="limit")
    gamma = post["posterior"]["gamma"].values[1, 7]
    at = jax.jit(lambda value: law(value, path).log_prob(path.observed))
    each = np.stack([at(value) for value in gamma])
    expected = np.log(np.exp(each).mean(axis=0))
    np.testing.assert_allclose(post["log_likelihood"]["covariance"].values[1, 7], expected, rtol=1e-10)
    assert not {"layers", "prior_predictive", "posterior_predictive"} & set(post.children)
    assert post.attrs["architecture"] == "none"
    si.write(post, tmp_path / "post.nc")
    back = read_posterior(tmp_path / "post.nc")
    told = str(si.check(back))
    assert "not tested: one-step innovations, other architectures and the range of the law: the program has no" in told
    assert "not tested: networks left out and distance from predictions: there are no predictions" in told
    assert set(figures(back)) == {"posterior", "ranks"}
    pyplot.close("all")


@pytest.mark.long
def test_a_factor_has_the_density_of_its_mixture(data):
    path, at = si.prepare(EACH(mixture), data), {"gamma": jnp.array([0.4, 0.7])}
    ours, theirs = (float(density(program, path, at)) for program in (mixture, by_factor))
    assert theirs == pytest.approx(ours, rel=1e-10)


@EACH
def constrained(path):
    """Sites whose unconstrained values have other shapes; γ is beta(1, 2) by its prior."""
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("chol", dist.LKJCholesky(3, 2.0))
    numpyro.sample("sum", dist.ZeroSumNormal(1.0, (3,)))
    numpyro.sample("order", dist.TransformedDistribution(dist.Normal().expand([2]).to_event(1), OrderedTransform()))
    with numpyro.plate("network", path.networks):
        numpyro.sample("own", dist.Dirichlet(jnp.ones(2)))
        numpyro.sample("covariance", law(w[0], path), obs=path.observed)


@pytest.mark.long
def test_sites_with_constraints_of_vectors_are_fitted(data):
    """Against quadrature over γ, which does not depend on the others."""
    program = handlers.reparam(constrained, config={"own": ExplicitReparam(StickBreakingTransform().inv)})
    post = si.fit(program, data, chains=2, draws=150, warmup=150, predictions=4, key=jr.key(1))
    np.testing.assert_allclose(post["posterior"]["w"].sum("w_dim_0"), 1)
    assert (post["posterior"]["order"].diff("order_dim_0") > 0).all()
    assert post["posterior"]["own_base"].dims[2:] == ("network", "own_base_dim_1")
    # The ones and zeros of a Cholesky factor are no parameters.
    names = [name for name in si.summarise(post).index if name.startswith("chol")]
    assert names == [f"chol[{entry}]" for entry in ("1, 0", "1, 1", "2, 0", "2, 1", "2, 2")]
    path, grid = si.prepare(program, data), np.linspace(0.2, 0.98, 200)
    at = jax.jit(jax.vmap(lambda gamma: law(gamma, path).log_prob(path.observed).sum()))
    log_density = np.asarray(at(grid)) + np.log(1 - grid)
    weights = np.exp(log_density - log_density.max())
    mean = np.average(grid, weights=weights)
    sd = np.sqrt(np.average((grid - mean) ** 2, weights=weights))
    draws = post["posterior"]["w"].values[..., 0]
    errors = [array_stats.mcse(draws, method=method) for method in ("mean", "sd")]
    assert_estimate([draws.mean(), draws.std()], [mean, sd], errors)


def discrete(path):
    k = numpyro.sample("k", dist.Categorical(jnp.full(2, 0.5)))
    numpyro.sample("covariance", law(jnp.array([0.4, 0.6])[k], path), obs=path.observed)


def improper(path):
    gamma = numpyro.sample("gamma", dist.ImproperUniform(dist.constraints.unit_interval, (), ()))
    numpyro.sample("covariance", law(gamma, path), obs=path.observed)


@EACH
def with_namesake(path):
    several(path)
    numpyro.sample("covariance", dist.Normal(), obs=0.0)


def subsampled(path, size=None):
    gamma = numpyro.sample("gamma", dist.Beta(2, 2))
    with numpyro.plate("network", path.networks, subsample_size=size) as some:
        numpyro.sample("covariance", law(gamma, path[some]), obs=path[some].observed)


@pytest.mark.long
@pytest.mark.parametrize("assumed", ["limit", "finite-width"])
def test_a_path_takes_the_indices_of_a_plate(assumed, data):
    """Each density is that of the network; a plate of some counts each for more."""
    path, some = si.prepare(subsampled, data, law=assumed), np.array([3, 1])
    for each in (path, si.transitions(data, law=assumed)):
        np.testing.assert_allclose(log_prob(each[some]), log_prob(each)[some], rtol=1e-12)
    two = functools.partial(subsampled, size=2)
    chosen = handlers.substitute(two, data={"network": jnp.asarray(some)})
    of_data = NETWORKS / 2 * log_prob(path[some]).sum()
    expected = of_data + dist.Beta(2, 2).log_prob(0.5)
    np.testing.assert_allclose(density(chosen, path, {"gamma": 0.5}), expected, rtol=1e-12)


@pytest.mark.long
def test_samplers_of_numpyro_run_programs(data):
    """HMCECS; and one that leaps far in its warmup comes back (it stayed at γ = 1)."""
    for kernel, program, sizes in (
        (HMCECS(NUTS(functools.partial(subsampled, size=2))), subsampled, 20),
        (BarkerMH(of_two), of_two, 100),
    ):
        mcmc = MCMC(kernel, num_warmup=sizes, num_samples=sizes, progress_bar=False)
        mcmc.run(jr.key(1), si.prepare(program, data))
        assert min(values.std() for values in mcmc.get_samples().values()) > 1e-3


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            in_plate(7),
            "plate: numpyro.plate.* around the law of 1 networks, got the shape .7,.; .* declare si.models.each_",
        ),
        (EACH(in_plate(7)), "model: program has a plate network of 7, which does not fit 5 networks"),
        (EACH(in_plate(NETWORKS, outer=3)), r"plate: .* around the law of 5 networks, got the shape \(3, 5\)"),
        (
            several.program,
            "model: several is declared for one layer of all networks, but effect is of each network: si.models.each_",
        ),
        (with_noise, "but noise is of each network"),
        (masked, "but covariance is of each network"),
        (some_of, "but V is of each network"),
        (of_covariate, "gamma: one value, or one for each of 1 networks, .* declare a program with a layer of each"),
        (mixture, "model: mixture is declared .*, but no single layer is observed: si.models.each_network"),
        (by_factor, "model: by_factor is declared .*: si.models.each_network"),
        (functools.partial(subsampled, size=2), r"the plate network of subsampled takes 2 of|plate: "),
        (functools.partial(own_plate, obs=None), "model: V of own_plate is not observed: obs=path.observed is needed"),
        (
            EACH(functools.partial(own_plate, obs_mask=jnp.arange(NETWORKS) < 3)),
            "model: V_unobserved of own_plate is not observed: .* fewer networks",
        ),
        (discrete, "model: k of discrete is discrete, and has no gradient: sum it out"),
        (improper, "model: gamma of improper has an improper prior, which cannot be drawn"),
        (with_namesake, "covariance is the name of the observed networks"),
    ],
)
def test_what_is_not_declared_or_observed_is_one_line(program, message, data):
    with pytest.raises(si.InputError, match=message):
        si.fit(program, data, key=jr.key(0))


@pytest.mark.parametrize("program", [in_plate(NETWORKS), masked, some_of])
def test_what_needs_every_network_has_their_densities(program, data):
    """A plate of a number, a mask, and some of the networks, against those of single networks."""
    each = log_prob(si.prepare(own_plate, data, law="limit"))
    path, prior = si.prepare(EACH(program), data, law="limit"), {"program": 0.0}.get(program.__name__, np.log(1.5))
    chosen = {"masked": each[:2], "some_of": each[np.array([0, 2])]}.get(program.__name__, each)
    model = EACH(program)
    found = density(model, model.pool(path), {"gamma": 0.5})
    np.testing.assert_allclose(found, chosen.sum() + prior, rtol=1e-10)


def of_two(path):
    gamma, gap = numpyro.sample("gamma", dist.Beta(2, 2)), numpyro.sample("gap", dist.LogNormal())
    with numpyro.plate("network", path.networks):
        layer = si.ResidualFeedForward(gamma=gamma, c_plus=gap / 2, c_minus=-gap / 2)
        numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)


@pytest.mark.long
@pytest.mark.parametrize("adjusted", [True, False], ids=["adjusted", "plain"])
def test_far_points_have_no_density_and_no_slope(adjusted, data):
    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    @functools.partial(jax.value_and_grad, argnums=1)
    def slopes(path, values):
        gamma, gap = values
        layer = si.ResidualFeedForward(gamma=gamma, c_plus=gap / 2, c_minus=-gap / 2)
        return CovariancePath(layer, path).log_prob(path.observed).sum()

    path = si.prepare(of_two, data) if adjusted else si.transitions(data)
    far = [(0.0, 1.0), (0.5, jnp.inf)] + adjusted * [(1e-308, 1.0), (0.5, 1e300), (0.5, 0.0), (1.0, 1.0)]
    density, slope = slopes(path, jnp.asarray([*far, (0.5, 1.0)]))
    np.testing.assert_array_equal(density[:-1], -np.inf)
    np.testing.assert_array_equal(np.stack(slope)[:-1], 0.0)
    assert np.isfinite(density[-1])


def test_networks_are_not_counted_twice(data):
    """Two sites with all networks are refused; parts of them may have different laws."""

    def at_two_sites(path, parts):
        gamma = numpyro.sample("gamma", dist.Uniform(0, 1).expand([2]).to_event(1))
        for number, part in enumerate(parts):
            some = path if part is None else path[part]
            with numpyro.plate(f"networks_{number}", some.networks):
                numpyro.sample(f"V_{number}", law(gamma[number], some), obs=some.observed)

    with pytest.raises(si.InputError, match="model: at_two_sites observes networks twice, at V_0 and V_1: observe all"):
        si.fit(functools.partial(at_two_sites, parts=(None, None)), data, key=jr.key(0))
    parts = jnp.arange(2), jnp.arange(2, NETWORKS)
    path = si.prepare(EACH(functools.partial(at_two_sites, parts=parts)), data, law="limit")
    assert path.networks == NETWORKS
