"""Single paths: against composed flows, by Diffrax alone, and from singular starts."""

import functools
import itertools

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import LAYERS, random_covariance
from helpers.given_normals import BrownianArray, paths_from
from helpers.internals import flows_of, gram, scan_paths, semidefinite_cholesky, step_grid
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.solve import CovarianceTerm, PSDSplitting

DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
TIMES, STEP, PATHS = [0.02, 0.13], 0.06, 5
"""Of most tests: one program for each layer and type."""
GRID = step_grid(TIMES, STEP)


def normals_for(layer, tokens: int, paths: int = PATHS, grid=GRID):
    return jr.normal(jr.key(tokens), (paths, len(grid.steps) - 1, *layer.limit().normals(tokens)))


@functools.partial(jax.jit, static_argnames="number")
def one_flow(limit, X, h, G, *, number: int):
    return flows_of(limit, h, jnp.sqrt(h) * G, tangents=False)[number](X)


def composed_paths(limit, V0, grid, normals) -> np.ndarray:
    """V of shape (times, m, m, paths): the flows one after the other, by turns in both orders."""
    X = jnp.asarray(np.moveaxis(np.linalg.cholesky(np.moveaxis(V0, -1, 0)), 0, -1))
    G = np.asarray(normals)
    flows = range(len(flows_of(limit, jnp.array(0.1), jnp.asarray(G[0]), tangents=False)))
    path = {0.0: np.asarray(gram(X))}
    for number, (start, end) in enumerate(itertools.pairwise(grid.steps)):
        for flow in reversed(flows) if number % 2 else flows:
            X = one_flow(limit, X, end - start, G[number], number=flow)
        path[end] = np.asarray(gram(X))
    return np.stack([path[time] for time in grid.saved])


@pytest.mark.long
def test_diffrax_alone_takes_its_own_brownian_motion(key):
    """Four steps of 0.05 as a user of Diffrax would take them."""
    limit, V0, grid = LAYERS["transformer"]().limit(), np.asarray(random_covariance(3)), step_grid([0.05, 0.2], 0.05)
    brownian = diffrax.VirtualBrownianTree(0.0, 0.2, tol=0.01, shape=limit.normals(3), key=key)

    @jax.jit
    def by_diffrax(X0):
        return diffrax.diffeqsolve(
            CovarianceTerm(limit, brownian),
            PSDSplitting(),
            t0=0.0,
            t1=0.2,
            dt0=0.05,
            y0=X0,
            saveat=diffrax.SaveAt(ts=grid.saved),
            stepsize_controller=diffrax.ConstantStepSize(),
            max_steps=4,
        ).ys

    increments = jax.jit(jax.vmap(brownian.evaluate))(jnp.array(grid.steps[:-1]), jnp.array(grid.steps[1:]))
    expected = composed_paths(limit, V0[..., None], grid, np.asarray(increments)[..., None] / np.sqrt(0.05))
    X = np.asarray(by_diffrax(np.linalg.cholesky(V0)))
    assert_agrees(X @ np.swapaxes(X, 1, 2), expected[..., 0])


def singular_starts() -> dict[str, np.ndarray]:
    """Covariances of four tokens that are singular."""
    X = np.random.default_rng(1).normal(size=(4, 6)) / np.sqrt(6)
    one = np.array([0.5, 1.0, 1.5, 0.8])[:, None] * X[:1]
    pair = X[[0, 0, 1, 2]]
    tokens = {
        "multiples of one": one,
        "equal": X[[0, 0, 0, 0]],
        "two of them equal": pair,
        "two of them opposite": pair * np.array([1, -1, 1, 1])[:, None],
        "all of them opposite": X[[0, 0, 0, 0]] * np.array([1, -1, 1, -1])[:, None],
        "a zero": X * np.array([0, 1, 1, 1])[:, None],
        "a zero among equals": X[[0, 1, 1, 1]] * np.array([0, 1, 1, 1])[:, None],
        "nothing": 0 * X,
    }
    return {name: x @ x.T for name, x in tokens.items()}


HANDFUL = step_grid([0.05, 0.1, 0.28, 0.5], 0.05)


def of_all_layers(paths: int, dtype) -> tuple[si.layers.Limit, np.ndarray]:
    """The coefficients of every layer, so many paths of each, and normals."""
    names = ("attention_drift", "relu_drift", "linear_noise", "attention_noise")
    limits = [LAYERS[name]().limit() for name in LAYERS]
    stacked = (np.repeat([getattr(limit, name) for limit in limits], paths).astype(dtype) for name in names)
    normals = normals_for(LAYERS["transformer"](), 4, paths=paths * len(limits), grid=HANDFUL)
    return si.layers.Limit(*stacked), np.moveaxis(normals, 0, -1).astype(dtype)


@jax.jit
def solve_from(limit, V0, normals):
    brownian = BrownianArray(jnp.asarray(HANDFUL.steps, V0.dtype), normals)
    return scan_paths(limit, semidefinite_cholesky(V0), HANDFUL, brownian)


@pytest.mark.long
def test_many_v0_and_many_coefficients_are_solved_side_by_side():
    limit, normals = of_all_layers(8, np.float64)
    V0 = 0.3 * np.stack([random_covariance(4, seed) for seed in range(normals.shape[-1])], axis=-1)
    V, stopped = solve_from(limit, V0, normals)
    assert np.isinf(stopped).all()
    assert_agrees(V, composed_paths(limit, V0, HANDFUL, normals))


@DTYPES
def test_singular_starts_stay_covariances_of_the_rank_that_the_theory_says(dtype):
    starts = singular_starts()
    limit, normals = of_all_layers(len(starts), dtype)
    V0 = np.tile(np.stack(list(starts.values()), axis=-1), len(LAYERS)).astype(dtype)
    V, stopped = solve_from(limit, V0, normals)
    assert V.dtype == dtype
    assert jnp.isinf(stopped).all()
    of_layers = np.split(np.moveaxis(np.asarray(V, np.float64), -1, 0), len(LAYERS))
    for paths, relu in zip(of_layers, np.split(np.asarray(limit.relu_drift), len(LAYERS)), strict=True):
        assert_ranks(dict(zip(starts, paths, strict=True)), float(jnp.finfo(dtype).eps), linear=not relu.any())


def assert_ranks(of: dict[str, np.ndarray], eps: float, *, linear: bool) -> None:
    rounding = 4 * eps
    for path in of.values():
        assert np.isfinite(path).all()
        np.testing.assert_array_equal(path, np.swapaxes(path, 1, 2))
        assert (np.linalg.eigvalsh(path)[:, 0] >= -rounding * np.trace(path, axis1=1, axis2=2)).all()
    # Every term gives equal tokens equal increments, and a zero token none.
    for start, equal in (
        ("equal", [0, 1, 2, 3]),
        ("two of them equal", [0, 1]),
        ("a zero among equals", [1, 2, 3]),
    ):
        rows, largest = of[start][:, equal], np.einsum("tii->ti", of[start]).max()
        assert (np.abs(rows - rows[:, :1]) <= 8 * rounding * np.sqrt(largest)).all()
    for start in ("a zero", "a zero among equals"):
        np.testing.assert_array_equal(of[start][:, 0], 0)
    # Every term of the SDE is a multiple of an entry of V.
    np.testing.assert_array_equal(of["nothing"], 0)
    # ν(1) = 0, and all other terms multiply X: tokens on one ray stay there, and without a ReLU no rank grows at all.
    ranks = {"multiples of one": 1, "equal": 1, "two of them equal": 3, "a zero": 3, "a zero among equals": 1}
    ranks |= {"two of them opposite": 3, "all of them opposite": 1} if linear else {}
    for start, rank in ranks.items():
        eigenvalues = np.linalg.eigvalsh(of[start])[:, ::-1]
        assert (eigenvalues[:, rank:] <= 2 * rounding * eigenvalues[:, :1]).all(), start


@pytest.mark.long
@DTYPES
def test_relu_networks_have_no_scale(dtype):
    """Without attention the SDE is linear in V's scale; that of a power of four is exact in floating point."""
    V0, normals = random_covariance(3).astype(dtype), normals_for(LAYERS["mlp"](), 3)
    one = paths_from(LAYERS["mlp"](), V0, TIMES, normals, step=STEP)
    for exponent in (-40, 40):
        scaled = paths_from(LAYERS["mlp"](), V0 * 4.0**exponent, TIMES, normals, step=STEP)
        np.testing.assert_array_equal(scaled, one * 4.0**exponent)
