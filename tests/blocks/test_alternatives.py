"""Other blocks than the declared ones, by the densities of increments."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
from helpers.cases import random_covariance
from helpers.internals import BlockOrder, branch_coefficients, evidence_of_others
from scipy.integrate import trapezoid

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, SelfAttention

WIDTH = 64
V3 = np.asarray(random_covariance(3))
GATED, PLAIN = (Block(MLP(1.5, "silu", 1.0, gated), 0.5) for gated in (True, False))
WITHOUT, WITH = "units have no gate", "units have a gate"
BRANCHES = {
    "attention": SelfAttention(heads=4, rope=1e4, rope_size=8, qk_norm="head", cap=5.0, sink=0.0, gate=1.0),
    "latent attention": LatentAttention(heads=4, head_size=16, rotated_size=8, pattern=si.CAUSAL),
    "experts": Experts(experts=8, chosen=2, shared=1.0, offset=1.0),
    "mlp": MLP(activation="tanh"),
}


@pytest.fixture(scope="module")
def data():
    """Increments of networks of gated units."""
    return si.sample_branches(GATED, V3, width=WIDTH, depth=2, networks=16, key=jr.key(1))


def test_evidence_is_the_integral_over_strengths(data):
    """The density of each of 32 increments is integrated over its log g², by the declared block and by the other."""

    def log_integral(block):
        x = np.linspace(-20, 20, 20_001)
        one, linear, square, rest = np.moveaxis(
            branch_coefficients(data, BlockOrder.of(block, depth=2), log2=10)[:, :, 16], -1, 0
        )
        polynomial = one[..., None] + linear[..., None] * x + square[..., None] * x**2
        return (np.log(trapezoid(np.exp(polynomial), x)) + rest).sum()

    expected = log_integral(PLAIN) - log_integral(GATED)
    evidence = evidence_of_others(data, BlockOrder.of(GATED, depth=2), "mlp")
    assert evidence[WITHOUT] == pytest.approx(expected, rel=1e-6)
    assert expected < 0


@pytest.mark.long
def test_the_block_of_the_networks_has_the_best_evidence(data):
    """Two blocks that differ in one way have opposite evidence."""
    of_plain = evidence_of_others(data, BlockOrder.of(PLAIN, depth=2), "mlp")
    assert max(of_plain, key=of_plain.get) == WITH
    assert of_plain[WITH] == pytest.approx(-evidence_of_others(data, BlockOrder.of(GATED, depth=2), "mlp")[WITHOUT])


@pytest.mark.parametrize("name", BRANCHES)
def test_alternatives_are_other_branches_of_their_kind(name):
    branch = BRANCHES[name]
    others = branch.alternatives(WIDTH)
    assert len(others) >= 4
    for other in others.values():
        other.check_width(WIDTH)
        fields = [field.name for field in dataclasses.fields(branch)]
        assert any(getattr(other, field) != getattr(branch, field) for field in fields)


def test_alternatives_of_today_name_what_code_leaves_out():
    assert {"queries and keys have no norms", "logits have no cap", "outputs of heads have no gate"} <= set(
        BRANCHES["attention"].alternatives(WIDTH)
    )
    assert "tokens attend to later ones too" in BRANCHES["latent attention"].alternatives(WIDTH)
    assert "weights of experts are by a softmax over all" in BRANCHES["experts"].alternatives(WIDTH)


@pytest.mark.long
def test_a_check_names_the_block(data):
    post = si.fit(si.models.branches, data, architecture=PLAIN, chains=2, draws=200, warmup=200, key=jr.key(2))
    verdict = next(v for v in si.check(post).verdicts if v.name == "evidence for another block")
    assert not verdict.passed
    assert WITH in verdict.advice
