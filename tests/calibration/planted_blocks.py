"""Networks of blocks of today in which one thing is other than declared, and the verdicts on them."""

import dataclasses
from typing import Any

import jax.random as jr
import numpy as np

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, SelfAttention

WIDTH, DEPTH, TOKENS = 128, 8, 4

NORMED = SelfAttention(gain=0.5, heads=4, key_value_heads=2, rope=1e4, qk_norm="head", pattern=si.CAUSAL)
WIDE = SelfAttention(0.4, 2.0, heads=4, cap=2.0, sink=0.0, rope=1e4, pattern=si.CAUSAL)
LATENT = LatentAttention(0.3, heads=4, head_size=16, rotated_size=16, key_rank=32, query_rank=32, pattern=si.CAUSAL)
EXPERTS = Experts(0.5, experts=8, chosen=2, router=1.0, expansion=1.0, shared=1.0)

FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "right: norms of queries and keys": (NORMED, {}),
    "right: cap and sink": (WIDE, {}),
    "right: latent attention": (LATENT, {}),
    "right: experts": (EXPERTS, {}),
    "norms of queries and keys left out": (NORMED, {"qk_norm": None}),
    "no 1/√d_k after norms": (NORMED, {"temperature": (WIDTH // 4) ** -0.5}),
    "no mask": (NORMED, {"pattern": si.Pattern()}),
    "cap left out": (WIDE, {"cap": None}),
    "sink left out": (WIDE, {"sink": None}),
    "a temperature of √d_k over both parts of keys": (LATENT, {"temperature": 0.3 * 32**0.5}),
    "shared keys twice as large": (LATENT, {"rotated_gain": 4.0}),
    "softmax before the choice": (EXPERTS, {"scores": "all"}),
    "one expert in place of two": (EXPERTS, {"chosen": 1}),
    "shared expert left out": (EXPERTS, {"shared": 0.0}),
    "activation relu in place of silu": (EXPERTS, {"activation": "relu"}),
    "gate left out": (EXPERTS, {"gated": False}),
}
"""The declared branch, and what the networks have in its place."""

NAMED_AS = {
    "norms of queries and keys left out": "queries and keys have no norms",
    "no 1/√d_k after norms": "logits have no factor 1/√d_k",
    "no mask": "tokens attend to later ones too",
    "cap left out": "logits have no cap",
    "sink left out": "the softmax has no sink",
    "a temperature of √d_k over both parts of keys": "logits have the factor 1/√(d_k + r) twice",
    "softmax before the choice": "weights of experts are by a softmax over all",
    "one expert in place of two": "tokens choose one expert",
    "shared expert left out": "there are no shared experts",
    "activation relu in place of silu": "the activation is relu",
    "gate left out": "units have no gate",
}
"""Words of `check` for a fault, where it compares a block that has it."""


def judged(name: str, seed: int) -> dict[str, Any]:
    """The verdict on one network, from one prompt."""
    branch, changes = FAULTS[name]
    declared, real = (_layer(b) for b in (branch, dataclasses.replace(branch, **changes)))
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.2, norm=1.0)
    key = jr.key(np.random.SeedSequence([*name.encode(), seed]).generate_state(1)[0])
    data = si.sample_branches(real, V0, width=WIDTH, depth=DEPTH, key=key)
    data.attrs |= declared.layers[0].branch.pattern.attributes() if branch.kind == "attention" else {}
    post = si.fit(si.models.branches, data, architecture=declared, chains=2, draws=500, warmup=500, key=jr.key(seed))
    check = si.check(post)
    failed = [verdict.name for verdict in check.verdicts if not verdict.passed and verdict.topic != "identified"]
    notes = [note for note in check.notes if "times the declared" in note]
    words = next((verdict.advice for verdict in check.verdicts if verdict.name == "evidence for another block"), "")
    named = name in NAMED_AS and NAMED_AS[name] in words
    return {"name": name, "seed": seed, "failed": failed, "declared": notes, "named": named}


def _layer(branch: Any) -> si.Stack:
    other = MLP(0.5) if branch.kind == "attention" else SelfAttention(gain=0.5, heads=4, pattern=si.CAUSAL)
    pair = (branch, other) if branch.kind == "attention" else (other, branch)
    return si.Stack([Block(b, 0.3, "rms") for b in pair])
