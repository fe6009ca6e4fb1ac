import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import references
from budget import assert_mean
from conftest import random_covariance
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.covariance import factor, smooth_noise, spectrum


@jax.jit
def of_diffusion(limit, V, rotation, dV, xi):
    """All that the tests look at, in one program for all layers of one number of tokens."""
    diffusion, at = limit.diffusion(V), spectrum(V)
    noises = [
        smooth_noise(X, limit.linear_noise, limit.attention_noise).as_matrix()
        for X in (factor(V), jnp.linalg.cholesky(V) @ rotation)
    ]
    return {
        "root": diffusion.as_operator().as_matrix(),
        "smooth roots": [noise[pair_rows(len(V))] for noise in noises],
        "log det": diffusion.log_det(),
        "white": diffusion.whiten(dV),
        "returned": diffusion.whiten(diffusion.sample(xi)),
        "coloured": at.colour(at.whiten(dV)),
    }


def pair_rows(tokens: int) -> np.ndarray:
    """Where the entries α ≤ β are among all of a matrix, row by row."""
    rows, columns = np.triu_indices(tokens)
    return rows * tokens + columns


def symmetric(tokens: int, seed: int = 0) -> np.ndarray:
    S = np.random.default_rng(seed).normal(size=(tokens, tokens))
    return S + S.T


def found_at(layer, V):
    """What was found, with the arguments dV and ξ."""
    rng, tokens = np.random.default_rng(20230630), len(V)
    dV, xi = symmetric(tokens), rng.normal(size=tokens * (tokens + 1) // 2)
    rotation, _ = np.linalg.qr(rng.normal(size=V.shape))
    return jax.tree.map(np.asarray, of_diffusion(layer.limit(), V, rotation, dV, xi)) | {"dV": dV, "xi": xi}


def test_spectral_root_is_a_root_of_sigma(layer, V):
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_smooth_noise_is_a_root_of_sigma_for_any_factor(layer, V):
    for S in found_at(layer, V)["smooth roots"]:
        assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_log_det(layer, V):
    _, expected = np.linalg.slogdet(references.diffusion(layer, V))
    np.testing.assert_allclose(found_at(layer, V)["log det"], expected, rtol=1e-10, atol=1e-10)


def test_whitening_gives_the_mahalanobis_norm(layer, V):
    found = found_at(layer, V)
    dV = packed(found["dV"])
    expected = dV @ np.linalg.solve(references.diffusion(layer, V), dV)
    np.testing.assert_allclose(found["white"] @ found["white"], expected, rtol=1e-10)


def test_whitening_inverts_sampling(layer, V):
    found = found_at(layer, V)
    assert_agrees(found["returned"], found["xi"])


def test_colouring_inverts_whitening(layer, V):
    found = found_at(layer, V)
    assert_agrees(found["coloured"], found["dV"])


def test_repeated_eigenvalues_do_no_harm_to_the_values(layer):
    V = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3)
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


@jax.jit
@jax.value_and_grad
def size_of_noise(V, limit, G):
    noise = smooth_noise(jnp.linalg.cholesky(V), limit.linear_noise, limit.attention_noise)
    return jnp.sum(noise.mv(G) ** 2)


def test_smooth_noise_has_a_gradient_where_eigenvalues_repeat(layer):
    V = np.asarray(si.equicorrelated(tokens=4, correlation=0.2))
    limit, G = layer.limit(), np.random.default_rng(20230630).normal(size=(4, 4))
    direction, step = symmetric(4, seed=1), 1e-5
    slope = np.vdot(size_of_noise(V, limit, G)[1], direction)
    up, down = (size_of_noise(V + sign * step * direction, limit, G)[0] for sign in (1, -1))
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-7)


def test_a_singular_covariance_has_no_density(layer):
    V = np.asarray(si.equicorrelated(tokens=3, correlation=1.0)) - 1e-3 * np.diag([0, 0, 1])
    assert np.isnan(found_at(layer, V)["log det"])


@jax.jit
def root_of_diffusion(limit, V):
    return limit.diffusion(V).as_operator().as_matrix()


def test_single_precision_stays_single_and_close(layer):
    V = random_covariance(4)
    single = jax.tree.map(lambda x: np.asarray(x, np.float32), layer.limit())
    sample = np.asarray(root_of_diffusion(single, np.asarray(V, np.float32)))
    assert sample.dtype == np.float32
    # The condition number of V is the amplification of the Cholesky factor's rounding.
    tolerance = 100 * float(jnp.finfo(jnp.float32).eps) * float(np.linalg.cond(V))
    assert_agrees(sample @ sample.T, references.diffusion(layer, V), rtol=tolerance)


def test_samples_have_covariance_sigma(key):
    layer = si.ShapedTransformer(gamma=0.8, tau0=0.5, c_plus=0.0, c_minus=-1.0)
    V = si.equicorrelated(tokens=2, correlation=0.3)
    samples = packed(jax.jit(jax.vmap(layer.limit().diffusion(V).sample))(jr.normal(key, (20_000, 3))))
    assert_mean(samples, 0)
    assert_mean(samples[:, :, None] * samples[:, None, :], references.diffusion(layer, V))
