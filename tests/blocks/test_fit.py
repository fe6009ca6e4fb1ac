"""Fits of increments, and their check: strengths, gains and temperatures, and what breaks the law."""

import dataclasses

import block_references as naive
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from budget import assert_distribution, assert_holds, assert_same_posterior
from conftest import WARMUP, random_covariance
from likelihood.paths import log_prob

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.diagnostics._dependence import dependence_of_pairs, dependence_on_input
from sdeinfer.likelihood import BranchPath
from sdeinfer.networks import tokens_with_covariance
from sdeinfer.observation import BranchObserver

TOKENS, WIDTH, DEPTH = 4, 64, 6
V0 = random_covariance(TOKENS)
ATTENTION = blocks.Block(blocks.SelfAttention(heads=4, pattern=si.CAUSAL, gain=3.0), strength=0.6, norm="rms")
MLP = blocks.Block(blocks.MLP(gain=3.0, expansion=2.0), strength=0.8, norm="layer")
LAYER = si.Stack((ATTENTION, MLP))
BRANCHES = si.models.branches
SHAPES = {"mlp.gain": dist.LogNormal(1.0, 1.0), "attention.temperature": dist.LogNormal(0.0, 1.0)}


def fit(data, model=BRANCHES, architecture=LAYER, seed=5, **settings):
    given = {"chains": 2, "draws": 300, "warmup": WARMUP} | settings
    return si.fit(model, data, architecture=architecture, **given, key=jr.key(seed))


def draws(post, name: str) -> np.ndarray:
    return post["posterior"][name].values


@pytest.fixture(scope="module")
def data():
    """One network of six layers."""
    return si.sample_branches(LAYER, V0, width=WIDTH, depth=DEPTH, key=jr.key(1))


@pytest.fixture(scope="module")
def post(data):
    return fit(data)


def test_one_network_tells_its_strengths(post, data):
    for name, truth in (("attention.strength", 0.6), ("mlp.strength", 0.8)):
        assert_holds(draws(post, name), truth)
        assert draws(post, name).std() < 0.1 * truth
    found = si.check(post, data)
    assert found.verdict.startswith("good: trust attention.strength ± ")
    assert found.passed
    assert not found.notes
    assert post["observed_data"].sizes["branch"] == 2 * DEPTH
    assert "input" in post["constant_data"]
    assert (si.summarise(post).loc[["attention.strength", "mlp.strength"], "mean"] > 0).all()


def test_gains_and_temperatures_are_free_where_they_have_a_prior():
    """A steep activation and a sharp softmax, in four networks; the architecture declares other values."""
    declared = si.Stack(
        (
            dataclasses.replace(ATTENTION, branch=ATTENTION.branch.reshaped(1.5)),
            dataclasses.replace(MLP, branch=MLP.branch.reshaped(0.5)),
        )
    )
    data = si.sample_branches(LAYER, V0, width=WIDTH, depth=DEPTH, networks=4, key=jr.key(2))
    post = fit(data, architecture=declared, prior=SHAPES)
    truth = {"attention.strength": 0.6, "mlp.strength": 0.8, "mlp.gain": 3.0, "attention.temperature": 1.0}
    for name, value in truth.items():
        assert_holds(np.log(draws(post, name)), np.log(value))
    assert np.log(draws(post, "attention.temperature")).std() < 0.5
    assert si.check(post).passed


@pytest.mark.parametrize("model", [si.models.every_branch, si.models.branches_over_depth], ids=["free", "pooled"])
def test_strengths_of_layers_have_the_dimension_layer(model, data):
    post = fit(data, model)
    pooled = model is si.models.branches_over_depth
    for part, truth in (("attention", 0.6), ("mlp", 0.8)):
        name = f"{part}.layer_strength" if pooled else f"{part}.strength"
        assert post["posterior"][name].dims == ("chain", "draw", "layer")
        assert post["prior"][name].sizes["layer"] == DEPTH
        for layer in range(DEPTH):
            assert_holds(np.log(draws(post, name)[..., layer]), np.log(truth))
        if pooled:
            assert post["posterior"][f"{part}.strength_sd"].dims == ("chain", "draw")
            assert draws(post, f"{part}.strength_sd").mean() < 0.4
    assert not [verdict for verdict in si.check(post).verdicts if verdict.topic == "calibrated" and not verdict.passed]


def test_a_number_fixes_a_strength(data):
    post = fit(data, prior={"mlp.strength": 0.8})
    assert "mlp.strength" not in post["posterior"]
    assert post.attrs["fixed_mlp.strength"] == 0.8
    assert_holds(draws(post, "attention.strength"), 0.6)
    assert si.check(post).passed


def test_networks_of_two_widths_are_fitted_together(data):
    """The log density of all is the sum of those of each."""
    narrow = si.sample_branches(LAYER, V0, width=32, depth=DEPTH, networks=2, key=jr.key(7))
    parts = [narrow, data.assign_coords(network=[2])]
    both = xr.concat(
        parts,
        "network",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="override",
        combine_attrs="drop_conflicts",
    )
    post = fit(both)
    assert post["log_likelihood"]["increments"].sizes["network"] == 3
    assert_holds(draws(post, "attention.strength"), 0.6)
    assert_holds(draws(post, "mlp.strength"), 0.8)
    order = blocks.BlockOrder.of_data(LAYER, both)
    tables = [blocks.branch_coefficients(each, order) for each in (both, *parts)]
    np.testing.assert_allclose(tables[0], np.concatenate(tables[1:]), rtol=1e-9, atol=1e-9)


def test_single_precision_has_the_same_posterior(post, data):
    with jax.enable_x64(False):  # noqa: FBT003
        single = fit(data, seed=6)
    for name in ("attention.strength", "mlp.strength"):
        assert_same_posterior(draws(single, name), draws(post, name))
    assert si.check(single).passed


def test_the_density_of_increments_is_that_of_their_law(data):
    """The site's density, from tables, against the law of each increment; beyond the tables it is 0."""
    order = blocks.BlockOrder.of_data(LAYER, data)
    path = BranchPath.of(data, order, {"mlp.gain": dist.LogNormal(1.0, 1.0)})
    at = {"attention.strength": 0.5, "mlp.strength": 0.9, "mlp.gain": 4.0}
    expected = dist.LogNormal(1.0, 1.0).log_prob(4.0)
    for name in ("attention.strength", "mlp.strength"):
        expected += dist.LogNormal(*blocks.LOG_STRENGTH).log_prob(at[name])
    for branch, part in enumerate(order.part):
        block = LAYER.layers[part].with_parameters({"gain": 4.0} if part else {})
        V, D = (jnp.asarray(data[what].values[0, branch]) for what in ("input", "increment"))
        law = blocks.increment_law(block, V, D, blocks.nodes_of(block, TOKENS, WIDTH), width=WIDTH)
        expected += law.log_density(2 * np.log(at[f"{order.names[part]}.strength"]))
    np.testing.assert_allclose(log_prob(BRANCHES, path, at), expected, rtol=1e-6)
    assert log_prob(BRANCHES, path, at | {"mlp.gain": 97.0}) == -np.inf


def planted(*, strengths=1.0, blocks_of=LAYER, copied=(), seed=1, networks=1, weights=jr.normal):
    """The Dataset of networks whose strengths have factors for each branch, and in which branches share weights."""
    found = []
    for network in range(networks):
        key_start, key_layers = jr.split(jr.fold_in(jr.key(seed), network))
        X = tokens_with_covariance(V0, width=WIDTH, key=key_start)
        observer = BranchObserver(WIDTH, pattern=si.CAUSAL, network=network)
        factors = np.broadcast_to(strengths, 2 * DEPTH)
        for branch, factor in enumerate(factors):
            block = blocks_of.layers[branch % 2]
            number = copied[0] if branch in copied else branch
            U = block.read(X)
            D = factor * one_increment(block, U, jr.fold_in(key_layers, number))
            observer.add(U, D, kind=block.branch.kind)
            X = block.with_increment(X, D)
        found.append(observer)
    return si.observation.joined_branches(found)


@jax.jit
def _increment(block, U, key):
    return block.increment(U, key=key)


def one_increment(block, U, key):
    return _increment(block, U, key)


FACTORS = np.where(np.arange(2 * DEPTH) == 5, 1.5, 1.0)
SHARP = si.Stack((dataclasses.replace(ATTENTION, branch=ATTENTION.branch.reshaped(0.25)), MLP))
WITHOUT_NORM = si.Stack(tuple(dataclasses.replace(block, norm=None) for block in LAYER.layers))
MISFITS = {
    "one layer's strength": ({"strengths": FACTORS}, "largest ratio of a layer's strength", "mlp of branch 5: 1."),
    "a temperature": (
        {"blocks_of": SHARP, "networks": 2},
        "ratio of attention.temperature to the assumed one",
        "the increments prefer 0",
    ),
    "a norm left out": ({"blocks_of": WITHOUT_NORM}, "mean squares after norms, less 1", "is a norm left out"),
    "copied layers": ({"copied": (3, 7)}, "share of an increment in another branch's", "branches 3 (mlp) and 7 (mlp)"),
}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MISFITS)
def test_what_breaks_the_law_is_named(name, seed):
    given, verdict, words = MISFITS[name]
    found = si.check(fit(planted(**given, seed=seed)))
    assert not found.passed
    assert verdict in [each.name for each in found.verdicts if not each.passed]
    named = next(each for each in found.verdicts if each.name == verdict)
    assert words in named.advice


def test_networks_without_a_misfit_pass():
    assert si.check(fit(planted(seed=3))).passed


def dependent_rows(rng, *, networks=3, branches=3, share=0.0):
    """Datasets of independent normal rows, or with rows of branch 2 in part those of branch 0."""
    m, n = 2, 30
    D = rng.standard_normal((networks, branches, m, n))
    D[:, 2] = np.sqrt(1 - share**2) * D[:, 2] + share * D[:, 0]
    U = np.array([[1.0, 0.0], [0.7, 0.7]]) @ rng.standard_normal((networks, branches, m, n))
    product = lambda X, Y: np.einsum("...an,...bn->...ab", X, Y) / n  # noqa: E731
    return (
        U,
        D,
        xr.Dataset(
            {
                "input": (("network", "branch", "a", "b"), product(U, U)),
                "cross": (("network", "branch", "a", "b"), product(U, D)),
                "increment": (("network", "branch", "a", "b"), product(D, D)),
                "between": (("network", "branch", "other", "a", "b"), product(D[:, :, None], D[:, None])),
            },
            coords={"width": ("network", np.full(networks, n))},
        ),
    )


def test_dependence_is_that_of_determinants():
    rng = np.random.default_rng(4)
    U, D, data = dependent_rows(rng, share=0.6)
    worst = dependence_of_pairs(data)
    assert worst.where == (0, 2)
    n, m = D.shape[-1], D.shape[-2]
    wilks = sum(naive.log_wilks(d[0] @ d[0].T, d[0] @ d[2].T, d[2] @ d[2].T) for d in D)
    statistic = -(n - m - 0.5) * wilks
    from scipy import stats

    assert worst.p == pytest.approx(3 * stats.chi2.sf(statistic, 3 * m**2))
    assert 0.2 < worst.share < 0.6
    on_input = dependence_on_input(data, data)
    (branch,) = on_input.where
    wilks = sum(
        naive.log_wilks(u[branch] @ u[branch].T, u[branch] @ d[branch].T, d[branch] @ d[branch].T)
        for u, d in zip(U, D, strict=True)
    )
    assert on_input.p == pytest.approx(min(1, 3 * stats.chi2.sf(-(n - m - 0.5) * wilks, 3 * m**2)))


def test_p_values_of_independent_rows_are_uniform():
    """Of one pair; Bartlett's approximation is off by less than what 2,000 of them show."""
    rng = np.random.default_rng(5)
    p = [dependence_on_input(data, data).p for *_, data in (dependent_rows(rng, branches=3) for _ in range(1))]
    assert 0 < p[0] <= 1
    m, n, count = 2, 30, 2_000
    values = []
    for _ in range(count):
        X, Y = rng.standard_normal((2, m, n))
        one = lambda A: (("network", "branch", "a", "b"), A[None, None] / n)  # noqa: E731
        data = xr.Dataset(
            {"input": one(X @ X.T), "cross": one(X @ Y.T), "increment": one(Y @ Y.T)},
            coords={"width": ("network", [n])},
        )
        values.append(dependence_on_input(data, data).p)
    assert_distribution(values, lambda p: p)
