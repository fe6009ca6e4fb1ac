"""Many data sets with parameters from the prior, and their posteriors, cheaply: what the calibration studies share.

The posterior of four parameters needs no Markov chain: importance sampling from a Student's t in the unconstrained
parameters, twice adapted to its own weighted draws, costs a second a data set, and says by the Pareto k of its weights
whether it can be trusted. `nuts_draws` is what it is compared with.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_stats.base import array_stats
from helpers.internals import (
    Assumptions,
    Networks,
    PathStatistics,
    in_default_types,
    observed_path,
    path_layout,
    path_statistics,
    posterior_mode,
    potential,
)
from helpers.spending import SHARE, share
from numpyro import handlers
from numpyro.infer.util import constrain_fn
from scipy import stats

from sdeinfer.infer import NUTS
from sdeinfer.models import full_path

NODES = 48
"""As many for every data set, so that one function is compiled for all."""

LEVELS = (0.5, 0.9)

POINTS, ROUNDS, FREEDOM = 4000, 3, 5
FEW = 50
PARETO_K = 0.7


class Posterior(NamedTuple):
    """Weighted draws of every site, and the Pareto k of their weights."""

    draws: dict[str, np.ndarray]
    weights: np.ndarray
    k: float

    def mean_and_sd(self, name: str) -> tuple[float, float]:
        mean = np.average(self.draws[name], weights=self.weights)
        return mean, np.sqrt(np.average((self.draws[name] - mean) ** 2, weights=self.weights))

    def ranks(self, truth: dict[str, float], names: Iterable[str]) -> dict[str, float]:
        """Posterior probabilities below the truth."""
        return {name: float(self.weights[self.draws[name] < truth[name]].sum()) for name in names}


def draw_parameters(assumptions: Assumptions, key) -> dict[str, float]:
    """Every site of the prior, latent and deterministic."""
    model = handlers.seed(assumptions.sample_layer, key)
    return {name: float(site["value"]) for name, site in handlers.trace(model).get_trace().items()}


def statistics(data: xr.Dataset, assumptions: Assumptions) -> PathStatistics:
    """Of one data set, its networks taken together, as a fit of full paths prepares them."""
    path = observed_path(data)
    if assumptions.law == "finite-width":
        problem = Networks(full_path, assumptions, assumptions.kind)
        return problem.adjusted(problem.statistics(path, path_layout(path, nodes=NODES), pooled=True), path)
    return path_statistics(path, path_layout(path, nodes=NODES), pooled=True, assumptions=assumptions)


def posterior(prepared: PathStatistics, key, *, single: bool = False) -> Posterior:
    """By importance sampling, or by NUTS where its weights do not allow that."""
    sampled = importance_sample(prepared, key, single=single)
    if sampled.k <= PARETO_K:
        return sampled
    draws = nuts_draws(prepared, key)
    count = len(next(iter(draws.values())))
    return Posterior(draws, np.full(count, 1 / count), sampled.k)


def importance_sample(prepared: PathStatistics, key, *, single: bool = False) -> Posterior:
    """The posterior of full paths at pooled statistics, with densities in double or in single precision."""
    found = posterior_mode(full_path, prepared)
    sites, mode = tuple(found.sites), found.x
    curvature, axes = np.linalg.eigh(_hessian(prepared, sites, jnp.asarray(mode)))
    # Directions in which the mode is flat or worse are as wide as the prior.
    covariance = (axes / np.maximum(curvature, 1.0)) @ axes.T
    rng = np.random.default_rng(np.asarray(jr.key_data(key)))
    x = log_weights = np.empty(0)
    for _ in range(ROUNDS):
        proposal = stats.multivariate_t(mode, 1.5 * covariance, df=FREEDOM, seed=rng)
        x = proposal.rvs(POINTS)
        with jax.enable_x64(not single):
            potentials = _potentials(in_default_types(prepared), sites, jnp.asarray(x, float))
        log_weights = -np.asarray(potentials, np.float64) - proposal.logpdf(x)
        log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        if 1 / (weights**2).sum() > FEW:
            mode, covariance = weights @ x, np.cov(x.T, aweights=weights)
        else:
            # Too few to tell a covariance from: move there, and look at a wider one.
            mode, covariance = x[np.argmax(weights)], 2 * covariance
    # ArviZ's function takes log likelihoods, of which log weights are the negative, as in leave-one-out.
    smoothed, k = array_stats.psislw(log_weights.max() - log_weights)
    weights = np.exp(smoothed - smoothed.max())
    draws = jax.tree.map(np.asarray, _constrained(prepared, sites, jnp.asarray(x)))
    return Posterior(draws, weights / weights.sum(), float(k))


def nuts_draws(prepared: PathStatistics, key) -> dict[str, np.ndarray]:
    """The same posterior by NUTS."""
    samples = NUTS(chains=4, draws=1000, warmup=1000).sample(full_path, prepared, key=key).samples
    return {name: value.reshape(-1) for name, value in samples.items()}


def ranks_of_sets(one: Callable[..., dict[str, float] | None], data_sets: int, key) -> dict[str, np.ndarray]:
    """Ranks of the truth in the posteriors of so many data sets, for each parameter.

    `one` maps a key to the ranks in one data set, or to None where its data are refused: leaving a data set out by what
    its data say does not bias the others.
    """
    found, drawn = [], 0
    while len(found) < data_sets:
        ranks = one(jr.fold_in(key, drawn))
        drawn += 1
        found += [] if ranks is None else [ranks]
    print(f"\n{drawn - data_sets} of {drawn} data sets refused")
    return {name: np.array([each[name] for each in found]) for name in found[0]}


def assert_calibrated(ranks: dict[str, np.ndarray], what: str, *, draws: int = POINTS) -> None:
    """Ranks of the truth are uniform: posteriors have the right width, are not moved, and have the right shape.

    The first two are tests of one number each, of Φ⁻¹(rank), and have the power: see `power`. The third is that of
    Kolmogorov and Smirnov. `draws` is the number of independent draws in a posterior, which tell a rank from 0 and 1.
    """
    report(ranks, what)
    for name, u in ranks.items():
        for test, p in p_values(u, draws).items():
            assert p >= share(), f"{what}: {test} of posteriors of {name}, {len(u)} data sets: p = {p:.2g}"


def p_values(u: np.ndarray, draws: int = POINTS) -> dict[str, float]:
    """Two-sided p-values of uniform ranks, by the sum and the sum of squares of z = Φ⁻¹(u), and by all ranks."""
    z, count = stats.norm.ppf(np.clip(u, 0.5 / draws, 1 - 0.5 / draws)), len(u)
    squares, total = float(z @ z), float(z.sum())
    return {
        "width": 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count)),
        "place": 2 * float(stats.norm.sf(abs(total) / np.sqrt(count))),
        "shape": float(stats.kstest(u, "uniform").pvalue),
    }


def power(data_sets: int, narrow: float) -> float:
    """Probability that the test of width alone rejects posteriors whose sds are too small by a factor `narrow`."""
    low, high = stats.chi2(data_sets).ppf([SHARE / 2, 1 - SHARE / 2])
    return float(stats.chi2.sf(high / narrow**2, data_sets) + stats.chi2.cdf(low / narrow**2, data_sets))


def share_held(u: np.ndarray, level: float) -> float:
    """How often intervals of a level held the truth, whose ranks in the posteriors are u."""
    return float(((u > (1 - level) / 2) & (u < (1 + level) / 2)).mean())


def shares_held(u: np.ndarray) -> str:
    """The cell of a table: of all levels."""
    return "/".join(f"{share_held(u, level):.3f}".lstrip("0") for level in LEVELS)


def report(ranks: dict[str, np.ndarray], what: str) -> None:
    """A line for each parameter."""
    for name, u in ranks.items():
        errors = {level: np.sqrt(level * (1 - level) / len(u)) for level in LEVELS}
        held = ", ".join(f"{level:.0%}: {share_held(u, level):.3f} ± {error:.3f}" for level, error in errors.items())
        print(f"{what:32s} {name:6s} {held}; KS p = {stats.kstest(u, 'uniform').pvalue:.2g}", flush=True)


@eqx.filter_jit
def _hessian(prepared, sites, x):
    return jax.hessian(lambda x: potential(full_path, prepared, dict(zip(sites, x, strict=True))))(x)


@eqx.filter_jit
def _potentials(prepared, sites, points):
    return jax.lax.map(
        lambda x: potential(full_path, prepared, dict(zip(sites, x, strict=True))), points, batch_size=250
    )


@eqx.filter_jit
def _constrained(prepared, sites, points):
    def constrain(x):
        return constrain_fn(full_path, (prepared,), {}, dict(zip(sites, x, strict=True)), return_deterministic=True)

    drawn = jax.vmap(constrain)(points)
    return {name: value for name, value in drawn.items() if value.ndim == 1}
