"""Tangents and gradients of finite networks with their weights, to set against the SDE of the joint covariance 𝒱."""

from collections.abc import Callable, Iterable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import validate_covariance
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import check_parameters
from sdeinfer.layers._over_depth import layer_time
from sdeinfer.networks._sample import ENTRIES_AT_ONCE, batches, covariance_of, weights_batch
from sdeinfer.networks._tokens import tokens_with_covariance


def sample_tangents(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    directions: Float[Array | np.ndarray, "m m"],
    networks: int,
    observe_every: int = 1,
    key: PRNGKeyArray,
) -> Float[np.ndarray, "networks layers 2*m 2*m"]:
    """Draw networks with N(0, 1) weights and record the joint covariance 𝒱 = [[V, C], [Cᵀ, D]] of tokens and a tangent.

    The tangent Ẋ passes through every layer beside X, as its derivative along Ẋ: Γ = XẊᵀ/n, D = ẊẊᵀ/n. It starts in
    random directions orthogonal to those of the tokens, so that C is zero at layer 0 up to rounding.

    Arguments:
        layer: the architecture, with its parameters; repeated `depth` times with fresh weights.
        V0: covariance of the initial tokens, shape (m, m).
        width: n, at least 2m.
        depth: d ≥ 1, the number of layers.
        directions: D at layer 0, shape (m, m): e_βe_βᵀ moves token β only. 𝒱's D scales with it, and C with its root.
        networks: number of networks.
        observe_every: k, to record layers 0, k, 2k, … only.
        key: PRNG key.

    Returns:
        𝒱 in V0's floating-point type, shape (networks, layers, 2m, 2m).

    Raises:
        InputError: for a V0 or directions that are not covariances of one size, invalid sizes, or a network whose 𝒱
            overflows.
    """
    layer, V0 = _check(layer, V0, width=width, depth=depth, networks=networks, observe_every=observe_every)
    if observe_every > depth:
        raise InputError(f"observe_every: must not exceed the depth {depth}, got {observe_every}")
    D0 = validate_covariance(directions, "directions").astype(V0.dtype)
    if D0.shape != V0.shape:
        raise InputError(f"directions: shape {V0.shape}, that of V0, is needed, got {D0.shape}")
    sizes = {"width": width, "observe_every": observe_every, "observed": depth // observe_every}
    largest = ENTRIES_AT_ONCE // width**2
    (S,) = _in_batches(lambda keys: [weights_batch(layer, V0, keys, D0, **sizes)], networks, largest, key)
    return S


def sample_gradients(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    layers: Sequence[int],
    networks: int,
    cotangents: int = 8,
    key: PRNGKeyArray,
) -> tuple[Float[np.ndarray, "networks layers m"], Float[np.ndarray, "networks layers m m"]]:
    """Draw networks with N(0, 1) weights and back-propagate white cotangents from the output to some layers.

    With J_β the Jacobian of the output X_d by token β of X_ℓ, and cotangents g of independent N(0, 1) entries, the
    squared gradient norm ‖J_βᵀg‖²/n has the mean ‖J_β‖_F²/n over g. For one cotangent the SDE of 𝒱 predicts its law by
    that of Σ_α D_αα at the end, from D = e_βe_βᵀ and C = 0 at layer ℓ.

    Arguments:
        layer: the architecture, with its parameters; repeated `depth` times with fresh weights.
        V0: covariance of the initial tokens, shape (m, m).
        width: n ≥ m.
        depth: d ≥ 1, the number of layers.
        layers: the layers ℓ at which to record, ascending, from 0 to d.
        networks: number of networks.
        cotangents: number of cotangents over which each network's squared norms are averaged.
        key: PRNG key.

    Returns:
        the squared gradient norms ‖J_βᵀg‖²/n of each token, averaged over the cotangents, shape
        (networks, layers, m); and V at these layers, shape (networks, layers, m, m).

    Raises:
        InputError: for a V0 that is not a covariance, invalid sizes or layers, or a network that overflows.
    """
    layer, V0 = _check(layer, V0, width=width, depth=depth, networks=networks, cotangents=cotangents)
    recorded = np.asarray(layers)
    if recorded.ndim != 1 or recorded.size == 0 or not np.issubdtype(recorded.dtype, np.integer):
        raise InputError(f"layers: a list of whole numbers is needed, got {layers}")
    if recorded[0] < 0 or recorded[-1] > depth or (np.diff(recorded) <= 0).any():
        raise InputError(f"layers: ascending numbers from 0 to the depth {depth} are needed, got {recorded.tolist()}")
    sizes = {"width": width, "depth": depth, "cotangents": cotangents}
    # One layer's weights, the representations of all layers, and the cotangents.
    entries = max(width**2, (depth + 1) * len(V0) * width, cotangents * len(V0) * width)
    largest = ENTRIES_AT_ONCE // entries
    norms, V = _in_batches(lambda keys: _gradients_batch(layer, V0, keys, recorded, **sizes), networks, largest, key)
    return norms, V


@eqx.filter_jit
def _gradients_batch(layer, V0, keys, recorded, *, width, depth, cotangents):
    layer = jax.tree.map(lambda value: value.astype(V0.dtype), layer)

    def network(key):
        key_tokens, key_layers, key_cotangents = jr.split(key, 3)

        def forward(X, number):
            current_layer = layer.at(layer_time(number, width, X.dtype))
            return current_layer.forward(X, key=jr.fold_in(key_layers, number)), X

        def backward(gradients, layer_and_input):
            number, X = layer_and_input
            # The layer's weights are drawn again from their key, instead of being stored.
            _, pull_back = jax.vjp(lambda X: forward(X, number)[0], X)
            (gradients,) = jax.vmap(pull_back)(gradients)
            return gradients, squared_norms(gradients)

        def squared_norms(gradients):
            return jnp.mean(jnp.sum(gradients**2, axis=2), axis=0) / width

        X0 = tokens_with_covariance(V0, width=width, key=key_tokens)
        numbers = jnp.arange(depth)
        end, inputs = jax.lax.scan(forward, X0, numbers)
        white = jr.normal(key_cotangents, (cotangents, *X0.shape), X0.dtype)
        _, norms = jax.lax.scan(backward, white, (numbers, inputs), reverse=True)
        norms = jnp.concatenate([norms, squared_norms(white)[None]])
        X = jnp.concatenate([inputs, end[None]])
        return norms[recorded], jax.vmap(covariance_of)(X[recorded])

    return jax.vmap(network)(keys)


def _check(layer, V0, *, width: int, **sizes: int) -> tuple[AbstractLayer, np.ndarray]:
    """Check the parameters, V0 and the sizes, and convert V0 to JAX's floating-point type."""
    at_least_one(width=width, **sizes)
    V0, layer = validate_covariance(V0), check_parameters(layer)
    of_tangents = "observe_every" in sizes
    if width < len(V0) * (1 + of_tangents):
        rows = "tokens and their tangents" if of_tangents else "tokens"
        raise InputError(f"width: {len(V0)} {rows} need a width of at least {len(V0) * (1 + of_tangents)}, got {width}")
    layer.check_width(width)
    return layer, V0.astype(jax.dtypes.canonicalize_dtype(V0.dtype))


def _in_batches(
    draw: Callable[[Array], Iterable[Array]], networks: int, largest: int, key: PRNGKeyArray
) -> list[np.ndarray]:
    """Draw networks in `batches`; raises an `InputError` if one overflows."""
    drawn = [[np.asarray(values)[fresh] for values in draw(keys)] for _, keys, fresh in batches(networks, largest, key)]
    joined = [np.concatenate(parts) for parts in zip(*drawn, strict=True)]
    overflows = np.any([~np.isfinite(x).reshape(networks, -1).all(axis=1) for x in joined], axis=0)
    if overflows.any():
        count, first = np.count_nonzero(overflows), int(np.argmax(overflows))
        raise InputError(f"covariance: {count} of {networks} networks overflow, the first of them network {first}")
    return joined
