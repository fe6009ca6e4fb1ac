"""Covariances of finite networks by the chain, against the networks themselves."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import sdeinfer as si

pytestmark = pytest.mark.benchmark

LAYERS = {
    "transformer": lambda: si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=0.0, c_minus=-1.0),
    "transformer, H = 4, W_O, r = 4": lambda: si.ShapedTransformer(
        gamma=0.5, tau0=1.0, c_plus=0.0, c_minus=-1.0, heads=4, output_projection=True, expansion=4
    ),
    "mlp": lambda: si.ShapedMLP(c_plus=0.0, c_minus=-1.0),
}
LEAST_RATIO = 50


@pytest.fixture(autouse=True)
def _single_precision():
    with jax.enable_x64(False):  # noqa: FBT003
        yield


def sample(layer, *, tokens: int, width: int, depth: int, networks: int, method):
    V0, sizes = si.equicorrelated(tokens=tokens, correlation=0.2).astype(jnp.float32), {"width": width, "depth": depth}
    return lambda: si.sample_networks(
        layer, V0, **sizes, networks=networks, observe_every=depth, method=method, key=jr.key(0)
    )


@pytest.mark.parametrize("name", LAYERS)
def test_against_weights(name, timed, bounded):
    tokens, width = 4, 1024
    costs = {}
    for method, networks, depth in (("weights", 8, 4), ("chain", 2048, 16)):
        run = sample(LAYERS[name](), tokens=tokens, width=width, depth=depth, networks=networks, method=method)
        costs[method] = timed(run, repeats=3) / (networks * depth)
    print(f"\n{name}, n = {width}, m = {tokens}, float32: {costs['chain'] * 1e6:.1f} µs a layer and network,", end=" ")
    ratio = bounded("ratio", costs["weights"] / costs["chain"], least=LEAST_RATIO)
    print(f"{costs['weights'] * 1e6:.0f} µs with weights: {ratio}")


@pytest.mark.parametrize("width", [32, 128, 512])
def test_cost_of_a_layer(width, timed):
    tokens, networks, depth = 3, 2**14, 64
    run = sample(LAYERS["transformer"](), tokens=tokens, width=width, depth=depth, networks=networks, method="chain")
    cost = timed(run, repeats=3) / (networks * depth)
    print(f"\ntransformer, n = {width}, m = {tokens}, float32: {cost * 1e6:.2f} µs a layer and network", end=" ")
    print(f"on every core, {cost / (tokens * width) * 1e9:.2f} ns a normal")
