"""How much wider than normal the squared increments of finite networks are.

At width n the increments of one layer are normal up to O(1/n) only, and their squares are correlated. That biases
nothing, but a likelihood of independent normals would know the variances too well, by 20 to 90 % of its information at
n = 32 and by 1 to 6 % at n = 512. As in quasi-likelihood (McCullagh and Nelder 1989, §9), what it says of variances is
divided by a dispersion that is estimated from the data: for transition t of m tokens

    D_t = Σ_{i≤j} ((z_ij − μ_ij)²/v_ij − 1) / √(2p),     dispersion = max(1, var D_t),

which is 1 for independent normals; one for each width. What the likelihood says of means is linear in the increments,
and as it should be.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import constrain_fn

from sdeinfer.infer._mode import posterior_mode
from sdeinfer.likelihood import Path, PathStatistics, Program, terms_by_block, variance_of_terms


def with_dispersion(model: Program, path: Path, prepared: PathStatistics) -> PathStatistics:
    """Estimate the dispersion at the mode of the posterior, in a pass over the data.

    Arguments:
        model: the program, with its options given; under the limit's law the statistics are left as they are.
        path: the transitions.
        prepared: their statistics.
    """
    options = dict(model.options)
    if options["law"] == "limit":
        return prepared
    pooled = prepared.pooled()
    mode = posterior_mode(model, pooled)
    unconstrained = dict(zip(mode.sites, jnp.asarray(mode.x), strict=True))
    sites = constrain_fn(model, (pooled,), {}, unconstrained, return_deterministic=True)
    layer = options["architecture"].layer(**{name: sites[name] for name in options["architecture"].parameters})
    law = jax.tree.map(np.asarray, jax.vmap(layer.finite_width)(pooled.widths))
    count, first, second = (np.zeros(len(pooled.widths)) for _ in range(3))
    width = np.searchsorted(np.asarray(pooled.widths), path.width)
    for block, terms in terms_by_block(path):
        group = width[path.network[block]]
        here = jax.tree.map(lambda leaf, group=group: leaf[group], law)
        mean = np.einsum("ts,tsp->tp", here.drift, terms.drift)
        ratio = (terms.increments - mean) ** 2 / variance_of_terms(law, group, pooled, terms) - 1
        D = ratio.sum(axis=1) / np.sqrt(2 * ratio.shape[1])
        for total, power in ((count, 0), (first, 1), (second, 2)):
            np.add.at(total, group, D**power)
    dispersion = np.maximum(1.0, second / count - (first / count) ** 2)
    return eqx.tree_at(lambda s: s.dispersion, prepared, jnp.asarray(dispersion, prepared.dispersion.dtype))
