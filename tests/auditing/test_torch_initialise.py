"""Models of Hugging Face and PyTorch, initialised by tuned blocks: audits, and promises against initialisations."""

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, mean_and_error
from helpers.internals import unlike_blocks
from helpers.torch_models import (
    TORCH,
    bert,
    covariances,
    encoder,
    gpt2,
    hf,
    llama,
    log_norms_and_correlations,
    nn,
    prompt,
    run,
    sizes,
    torch,
    vit,
)

import sdeinfer as si
from sdeinfer import criteria as of
from sdeinfer.blocks import MLP, Block, SelfAttention

pytestmark = TORCH

WIDTH, LAYERS, PATHS, INITIALISATIONS = 64, 4, 2048, 200
SMALL = WIDTH, LAYERS
WORDS = sizes(*SMALL) | {"vocab_size": 99, "pad_token_id": None}
NEOX = {"rotary_pct": 1.0, "use_parallel_residual": False, "layer_norm_eps": 1e-8}
MODELS = {
    "gpt2": lambda: gpt2(*SMALL),
    "gpt_neox": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**WORDS, **NEOX)),
    "llama": lambda: llama(*SMALL),
    "phi3": lambda: hf.Phi3Model(hf.Phi3Config(**WORDS, num_key_value_heads=2, rms_norm_eps=1e-8)),
    "bert": lambda: bert(*SMALL),
    "vit": lambda: vit(*SMALL),
    "encoder": lambda: encoder(*SMALL, norm_first=True, activation="gelu"),
}
ROTATED = {"rope": 10_000.0, "pattern": si.CAUSAL}
GATED = {"activation": "silu", "gated": True}
BLOCKS = {
    "gpt2": ({"pattern": si.CAUSAL}, {"activation": "gelu_tanh"}, {}),
    "gpt_neox": (ROTATED, {}, {}),
    "llama": (ROTATED | {"key_value_heads": 2}, GATED, {"norm": "rms"}),
    "phi3": (ROTATED | {"key_value_heads": 2}, GATED, {"norm": "rms"}),
    "bert": ({}, {}, {"position": "post"}),
    "vit": ({}, {}, {}),
    "encoder": ({}, {}, {}),
}
"""Settings of attention, of the MLP, and of both blocks."""


def blocks_of(name):
    attention, mlp, both = BLOCKS[name]
    branches = SelfAttention(heads=4, **attention), MLP(**{"activation": "gelu", "expansion": 4} | mlp)
    return si.Stack(tuple(Block(branch, 1.0, **{"norm": "layer"} | both) for branch in branches))


def inputs_of(name):
    if name == "encoder":
        return prompt(WIDTH)
    if name == "vit":
        return {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": torch.arange(40, 44)[None]}


def stream(model, inputs):
    """Covariances of the residual stream, before the first and after the last layer."""
    found = []
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == LAYERS)

    def keep(X):
        found.append((X[0] if isinstance(X, tuple) else X)[0])

    def first(module, arguments, keywords):
        keep(arguments[0] if arguments else keywords["hidden_states"])

    handles = [
        layers[0].register_forward_pre_hook(first, with_kwargs=True),
        layers[-1].register_forward_hook(lambda module, arguments, output: keep(output)),
    ]
    run(model, inputs)
    for handle in handles:
        handle.remove()
    return covariances(found)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_read(name):
    model = MODELS[name]()
    assert unlike_blocks(blocks_of(name), si.blocks.of(model, inputs_of(name))) == []


@pytest.mark.parametrize(
    "name", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_tuned_models_pass_and_keep_promises(name, record):
    """Without a description; 200 initialisations have the promised mean log norm and mean correlation."""
    torch.manual_seed(0)
    model, inputs, post = MODELS[name]().eval(), inputs_of(name), name == "bert"
    V0 = stream(model, inputs)[0]
    goal = of.expectation(of.MeanCorrelation()) <= 0.6 if post else of.probability(of.NormFactor(), below=3) >= 0.9
    fixed, network = {"temperature": 0.5, "gain": 1.0}, {"width": WIDTH, "depth": LAYERS}
    settings = {"maximise": "strength", "subject_to": goal, "fixed": fixed, "paths": PATHS}
    tuned = si.tune(model, inputs, **settings, key=jr.key(1))
    np.testing.assert_allclose(tuned.problem.V0, V0[None], rtol=1e-5)
    audit = tuned.initialise(model, inputs, seed=1).audit
    assert audit.passed, audit.verdict
    before = {path: x.clone() for path, x in model.named_parameters()}
    with pytest.raises(si.InputError):
        tuned.initialise(model, {"nothing": torch.zeros(1)}, seed=2)
    assert all(torch.equal(x, before[path]) for path, x in model.named_parameters())
    after = []
    for seed in range(INITIALISATIONS):
        tuned.initialise(model, inputs, seed=100 + seed, audited=False)
        after.append(stream(model, inputs)[1])
    chains = si.sample_networks(tuned.layer, V0, **network, observe_every=LAYERS, networks=PATHS, key=jr.key(2))
    of_chains, of_models = (
        mean_and_error(log_norms_and_correlations(V, V0)) for V in (chains["covariance"].values[:, 1], np.stack(after))
    )
    cells = [f"{tuned.values['strength']:.3f}"]
    print(f"\n{name}: strength {cells[0]}; {audit.verdict}")
    for place, what in enumerate(("log norm", "correlation")):
        (promised, its_error), (measured, error) = ((x[place], e[place]) for x, e in (of_chains, of_models))
        both = np.hypot(its_error, error)
        cells.append(f"{promised:.3f}, {measured:.3f} ({both:.3f})")
        print(f"  {what}: promised, {INITIALISATIONS} initialisations (error): {cells[-1]}")
        if name == "bert" and what == "log norm":
            # A norm follows every sum.
            assert abs(measured - promised) < 1e-3
        else:
            assert_estimate(measured, promised, both)
    record("promises_of_blocks", {name: cells})


def test_other_heads_or_masks_than_tuned_are_named():
    blocks = blocks_of("gpt2")
    rule = si.tuning.recipe_for(blocks)
    with pytest.raises(si.InputError, match="head_size: the model has 16, and 32 is needed"):
        si.audit.initialise(gpt2(*SMALL), rule, inputs_of("gpt2"), head_size=32)
    found = si.audit.initialise(bert(*SMALL), rule).audit
    assert "the causal mask is not there" in found.verdict
