"""Laws of branches of today: norms of queries and keys, caps, sinks, gates, latent attention and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_references import attention_gram, latent_gram
from helpers.block_moments import (
    V3,
    WIDTH,
    assert_by_sampling,
    assert_differentiable,
    assert_moments_agree,
    by_chain,
    samples,
    scrambled,
)
from helpers.block_references import experts_gram, mlp_gram, packed_moments
from helpers.budget import assert_estimate
from helpers.internals import NetworkKeys
from scipy import special

import sdeinfer as si
from sdeinfer.blocks import MLP, Experts, LatentAttention, SelfAttention

BASE = 10.0
FULL = np.ones((3, 3))


def silu(z):
    return z * special.expit(z)


def attention(temperature, *, gate=None, mask=FULL, **sizes):
    """Attention with a gain of 2, and its plain twin."""
    branch = {"head_size": sizes["size"], "key_value_heads": sizes["groups"], "rope": sizes.get("base")}
    same = {name: sizes[name] for name in ("heads", "cap", "sink") if name in sizes}
    names = {"rotated_size": "rope_size", "norm": "qk_norm"}
    renamed = {names[name]: value for name, value in sizes.items() if name in names}
    pattern = {} if mask is FULL else {"pattern": si.CAUSAL}
    of_gates = None if gate is None else gate * V3
    return (
        SelfAttention(temperature, 2.0, gate=gate, **branch, **same, **renamed, **pattern),
        lambda draws, rng: attention_gram(
            2 * V3, mask, temperature=temperature, of_gates=of_gates, **sizes, draws=draws, rng=rng
        ),
    )


def latent(temperature, query_rank):
    """Latent attention and its plain twin: of so many heads that the keys which they share count."""
    gains = {"gain": 1.5, "rotated_gain": 9.0}
    sizes = {"heads": 8, "rotated_size": 2, "value_size": 12, "key_rank": 24, "query_rank": query_rank}
    return (
        LatentAttention(temperature, **gains, head_size=2, rope=BASE, **sizes),
        lambda draws, rng: latent_gram(
            V3, FULL, **gains, size=2, base=BASE, temperature=temperature, **sizes, draws=draws, rng=rng
        ),
    )


def experts(scores, *, gated=True, offset=0.0, shared=0.0):
    """Two of four experts, and their plain twin; fewer units or larger gains give sampled covariances heavy tails."""
    same = {"gain": 0.5, "router": 3.0, "experts": 4, "chosen": 2, "scores": scores, "scale": 1.3}
    of_unit = {"gated": gated, "offset": offset}
    return (
        Experts(**same, **of_unit, activation="silu", expansion=2.0, shared=shared),
        lambda draws, rng: experts_gram(
            V3, silu, 16, **same, **of_unit, shared_units=round(shared * WIDTH), draws=draws, rng=rng
        ),
    )


def gated(offset):
    """Gated units and their plain twin."""
    return (
        MLP(1.5, "silu", 0.5, gated=True, offset=offset),
        lambda draws, rng: mlp_gram(1.5 * V3, silu, 4, gated=True, offset=offset, draws=draws, rng=rng),
    )


TWINS = {
    "one norm, partial rotations, cap, sink, gate": attention(
        0.3,
        **{"gate": 6.0, "mask": np.tri(3), "heads": 4, "groups": 1, "size": 10},
        **{"base": BASE, "rotated_size": 2, "norm": "all", "cap": 3.0, "sink": 0.3},
    ),
    "latent attention": latent(0.7, 4),
    "experts": experts("chosen", shared=1.0),
    "gated with an offset": gated(1.0),
}
MORE = {
    "norms of heads, partial rotations, cap, sink": attention(
        0.3, mask=np.tri(3), heads=4, groups=2, size=6, base=BASE, rotated_size=2, norm="head", cap=1.5, sink=0.3
    ),
    "gate": attention(0.5, gate=6.0, heads=4, groups=2, size=4),
    "gate of rotated heads": attention(0.5, gate=6.0, heads=2, groups=2, size=4, base=BASE, norm="head"),
    "norms of heads": attention(0.3, heads=4, groups=2, size=2, norm="head"),
    "norm over all heads, rotations": attention(0.3, heads=2, groups=1, size=4, base=BASE, norm="all"),
    "partial rotations": attention(1.0, heads=2, groups=2, size=6, base=BASE, rotated_size=4),
    "cap": attention(0.3, mask=np.tri(3), heads=2, groups=1, size=4, cap=0.7),
    "sink": attention(0.3, mask=np.tri(3), heads=2, groups=2, size=4, sink=-1.0),
    "latent attention of plain queries": latent(0.7, None),
    "experts by all": experts("all", offset=1.0),
    "experts by sigmoids, not gated": experts("sigmoid", gated=False),
}
SHARED = {
    "norm over all heads of four groups": attention(0.3, heads=4, groups=4, size=4, norm="all"),
    "norm over all heads of two groups, rotations": attention(0.3, heads=4, groups=2, size=4, base=BASE, norm="all"),
}
DRAWS = 8_000


@pytest.mark.parametrize("name", TWINS)
def test_moments_are_those_of_plain_sampling_of_the_chain_and_of_weights(name, key):
    assert_moments_agree(*TWINS[name], key, draws=DRAWS)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_more_moments_are_those_of_plain_sampling_of_the_chain_and_of_weights(name, key):
    assert_moments_agree(*MORE[name], key, draws=DRAWS)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARED)
def test_groups_that_share_a_norm(name, key):
    """Their covariance through the norm, which moments by nodes leave out, is that of plain sampling."""
    branch, draw = SHARED[name]
    means, _ = scrambled(branch, V3)
    plain, *others = [packed_moments(S) for S in samples(branch, draw, key, DRAWS)]
    for mean, covariance in others:
        assert_by_sampling(*mean, means)
        assert_estimate(covariance[0], plain[1][0], np.hypot(covariance[1], plain[1][1]))
    assert_by_sampling(*plain[0], means)


@pytest.mark.one_case("latent attention")
@pytest.mark.parametrize("name", TWINS)
def test_moments_are_differentiable(name):
    assert_differentiable(TWINS[name][0])


@pytest.mark.parametrize("name", ["latent attention", "experts"])
def test_the_chain_keeps_single_precision(name, key):
    branch, V = TWINS[name][0], np.repeat(V3[:, :, None, None], 8, axis=-1).astype(np.float32)
    keys = NetworkKeys.numbered(key, jnp.arange(8, dtype=jnp.uint32))
    S = jax.eval_shape(lambda V: branch.hidden_covariance(V, width=WIDTH, keys=keys), V)
    assert S.dtype == np.float32


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_precisions_share_random_numbers(name, key):
    branch = TWINS[name][0]
    single, double = (by_chain(branch, 64, key, dtype) for dtype in (np.float32, np.float64))
    assert single.dtype == np.float32
    # Random numbers of 24 bits and some operations: 10⁻⁴ of the size of S.
    np.testing.assert_allclose(single, double, atol=1e-4 * double.max())
