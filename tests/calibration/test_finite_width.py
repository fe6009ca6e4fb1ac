r"""Coverage of posteriors on real finite networks: parameters from the prior, data from the exact covariance chain.

Every data set is fitted twice, by the law of its width and by the limit's. The first is asserted to be calibrated; the
second is printed beside it, since the data are sized so that its bias shows: they tell variances to 4 % at n = 32 and
to 0.3 % at n = 512, and the limit's are wrong by 5 % and 0.3 %.

All widths on two cores, without threads of OpenBLAS that wait for each other:

    printf '%s\n' 512 128 64 32 | OPENBLAS_NUM_THREADS=1 xargs -P 2 -I{} \
        pytest -m slow -s tests/calibration/test_finite_width.py -k 'calibrated and full and {}'
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from arviz_stats.base import array_stats
from budget import assert_estimate
from calibration.study import (
    PARETO_K,
    Posterior,
    assert_calibrated,
    draw_parameters,
    importance_sample,
    nuts_draws,
    posterior,
    report,
    statistics,
)

import sdeinfer as si
from sdeinfer.infer import in_range
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions
from sdeinfer.models import full_path

DATA_SETS = 200
SIZES = {32: (50, 4), 64: (200, 8), 128: (500, 16), 512: (500, 64)}
"""Networks and depth at each width."""

TRANSFORMER = Architecture("transformer")
PATTERNS = {"full": si.Pattern(), "causal": si.CAUSAL, "prompts": si.Pattern(prompts=(2, 2))}
LAWS = ("finite-width", "limit")
ASSUMED = {
    name: {law: Assumptions(Architecture("transformer", pattern=pattern), law) for law in LAWS}
    for name, pattern in PATTERNS.items()
}
CASES = [(name, width) for name in PATTERNS for width in SIZES if name != "prompts" or width == 64]
IDENTIFIED = ("gamma", "tau0", "c_gap")


def initial_covariance(width, key, tokens=3):
    """Tokens of different norms and correlations; V/√n is 0.1 to 0.4, so that attention shows at every width."""
    key_scale, key_tokens = jr.split(key)
    X = jr.normal(key_tokens, (tokens, 12), jnp.float32)
    scale = jnp.exp(jr.uniform(key_scale, (), jnp.float32, jnp.log(0.1), jnp.log(0.4)))
    return scale * np.sqrt(width, dtype=np.float32) * X @ X.T / 12


def data_set(width, key, assumptions=ASSUMED["full"]["finite-width"], *, more: int = 1):  # noqa: B008 immutable
    """Parameters from the prior, and networks with them; None where none is in the law's range.

    `more` times as many networks as stated.
    """
    key_parameters, key_start, key_networks = jr.split(key, 3)
    networks, depth = SIZES[width]
    truth = draw_parameters(assumptions, key_parameters)
    kind = assumptions.kind
    V0 = initial_covariance(width, key_start, sum(kind.pattern.prompts) or 3)
    try:
        layer = kind.layer(**truth)
        data = si.sample_networks(layer, V0, width=width, depth=depth, networks=more * networks, key=key_networks)
        return truth, in_range(full_path, data, assumptions)[0]
    except si.InputError:
        return truth, None


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "width"), CASES)
def test_posteriors_of_finite_networks_are_calibrated(pattern, width, key):
    ranks = {law: {name: [] for name in IDENTIFIED} for law in LAWS}
    drawn = fitted = by_nuts = 0
    while fitted < DATA_SETS:
        key_data, key_fit = jr.split(jr.fold_in(jr.fold_in(key, width), drawn))
        truth, data = data_set(width, key_data, ASSUMED[pattern]["finite-width"])
        drawn += 1
        # Leaving a data set out by what its data say does not bias the others.
        if data is None:
            continue
        fitted += 1
        for law, assumptions in ASSUMED[pattern].items():
            found = posterior(statistics(data, assumptions), key_fit)
            by_nuts += found.k > PARETO_K
            for name in IDENTIFIED:
                ranks[law][name].append(found.rank(name, truth[name]))
    refused = f"{drawn - fitted} refused as out of range"
    print(f"\n{pattern}, n = {width}: {drawn} data sets drawn, {refused}; {by_nuts} fits by NUTS")
    uniform = {law: {name: np.array(u) for name, u in of_law.items()} for law, of_law in ranks.items()}
    for law in LAWS:
        report(uniform[law], f"{pattern}, n = {width}, {law}")
    assert_calibrated(uniform["finite-width"], f"{pattern}, n = {width}")


def estimates_and_errors(sampled: Posterior, draws: dict[str, np.ndarray], name: str) -> tuple[list, np.ndarray]:
    """Mean and standard deviation by NUTS, and the errors of their differences from those of weighted draws."""
    chains, (mean, sd) = draws[name].reshape(4, -1), sampled.mean_and_sd(name)
    own = [
        np.sqrt(sampled.weights**2 @ (x - sampled.weights @ x) ** 2) / scale
        for x, scale in ((sampled.draws[name], 1), ((sampled.draws[name] - mean) ** 2, 2 * sd))
    ]
    theirs = [float(array_stats.mcse(chains, chain_axis=0, draw_axis=1, method=method)) for method in ("mean", "sd")]
    return [chains.mean(), chains.std()], np.hypot(own, theirs)


@pytest.mark.slow
def test_importance_sampling_equals_nuts(key):
    """Means and standard deviations are one within their Monte Carlo errors, on data sets of every width."""
    for number, width in enumerate(SIZES):
        truth, data = data_set(width, jr.fold_in(key, number))
        if data is None:
            continue
        prepared = statistics(data, ASSUMED["full"]["finite-width"])
        sampled, draws = importance_sample(prepared, key), nuts_draws(prepared, key)
        for name in ("gamma", "c_gap"):
            mean, sd = sampled.mean_and_sd(name)
            print(f"n = {width} {name}: {mean:.4f} ± {sd:.4f}, NUTS {draws[name].mean():.4f} ± {draws[name].std():.4f}")
            assert_estimate([mean, sd], *estimates_and_errors(sampled, draws, name))
