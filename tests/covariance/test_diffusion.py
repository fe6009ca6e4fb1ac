import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import references
from budget import assert_mean
from conftest import random_covariance
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.covariance import factor, smooth_noise, spectrum, unvech


def test_spectral_root_is_a_root_of_sigma(layer, V):
    S = layer.limit().diffusion(V).as_operator().as_matrix()
    assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_smooth_noise_is_a_root_of_sigma_for_any_factor(layer, V, key):
    limit = layer.limit()
    rotation, _ = jnp.linalg.qr(jr.normal(key, V.shape))
    for X in (factor(V), jnp.linalg.cholesky(V) @ rotation):
        S = smooth_noise(X, limit.linear_noise, limit.attention_noise).as_matrix()
        rows, columns = np.triu_indices(len(V))
        S = S[rows * len(V) + columns]
        assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_log_det(layer, V):
    _, expected = np.linalg.slogdet(references.diffusion(layer, V))
    np.testing.assert_allclose(layer.limit().diffusion(V).log_det(), expected, rtol=1e-10, atol=1e-10)


def test_whitening_gives_the_mahalanobis_norm(layer, V, key):
    dV = unvech(jr.normal(key, (len(V) * (len(V) + 1) // 2,)))
    white = layer.limit().diffusion(V).whiten(dV)
    expected = packed(dV) @ np.linalg.solve(references.diffusion(layer, V), packed(dV))
    np.testing.assert_allclose(white @ white, expected, rtol=1e-10)


def test_whitening_inverts_sampling(layer, V, key):
    diffusion = layer.limit().diffusion(V)
    xi = jr.normal(key, diffusion.std.shape)
    assert_agrees(diffusion.whiten(diffusion.sample(xi)), xi)


def test_colouring_inverts_whitening(V, key):
    S = unvech(jr.normal(key, (len(V) * (len(V) + 1) // 2,)))
    assert_agrees(spectrum(V).colour(spectrum(V).whiten(S)), S)


def test_repeated_eigenvalues_do_no_harm_to_the_values(layer):
    V = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3)
    S = layer.limit().diffusion(V).as_operator().as_matrix()
    assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_smooth_noise_has_a_gradient_where_eigenvalues_repeat(layer, key):
    V = si.equicorrelated(tokens=4, correlation=0.2)
    limit, G = layer.limit(), jr.normal(key, (4, 4))

    def size(V):
        noise = smooth_noise(jnp.linalg.cholesky(V), limit.linear_noise, limit.attention_noise)
        return jnp.sum(noise.mv(G) ** 2)

    direction = unvech(jr.normal(jr.key(1), (10,)))
    slope = jnp.vdot(jax.grad(size)(V), direction)
    step = 1e-5
    difference = (size(V + step * direction) - size(V - step * direction)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)


def test_a_singular_covariance_has_no_density(layer):
    V = si.equicorrelated(tokens=3, correlation=1.0)
    assert jnp.isnan(layer.limit().diffusion(V.at[2, 2].add(-1e-3)).log_det())


def test_single_precision_stays_single_and_close(layer):
    V = random_covariance(4)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), layer.limit())
    sample = single.diffusion(V.astype(jnp.float32)).as_operator().as_matrix()
    assert sample.dtype == jnp.float32
    # The condition number of V is the amplification of the Cholesky factor's rounding.
    tolerance = 100 * float(jnp.finfo(jnp.float32).eps) * float(jnp.linalg.cond(V))
    assert_agrees(sample @ sample.T, references.diffusion(layer, V), rtol=tolerance)


def test_samples_have_covariance_sigma(key):
    layer = si.ShapedTransformer(gamma=0.8, tau0=0.5, c_plus=0.0, c_minus=-1.0)
    V = si.equicorrelated(tokens=2, correlation=0.3)
    samples = packed(jax.vmap(layer.limit().diffusion(V).sample)(jr.normal(key, (20_000, 3))))
    assert_mean(samples, 0)
    assert_mean(samples[:, :, None] * samples[:, None, :], references.diffusion(layer, V))
