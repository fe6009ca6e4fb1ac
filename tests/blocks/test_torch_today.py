"""Models of today: blocks that are read from a pass, strengths of fits, and promises of tuned networks."""

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_within, mean_and_error
from helpers.internals import BlockOrder, unlike_blocks
from helpers.torch_models import TORCH, covariances, log_norms_and_correlations, run, torch
from helpers.torch_today import TODAY, blocks_of, inputs, model_of

import sdeinfer as si
from sdeinfer import criteria as of

pytestmark = TORCH

SMALL, LAYERS, WIDE = 64, 4, 192
PATHS, INITIALISATIONS = 2_048, 64


@pytest.mark.parametrize("name", TODAY)
def test_blocks_of_today_are_read(name):
    torch.manual_seed(0)
    blocks = si.blocks.of(model_of(name, SMALL, 2), inputs())
    assert unlike_blocks(blocks_of(name, SMALL), blocks) == []
    assert type(blocks) is type(blocks_of(name, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", TODAY)
def test_strengths_are_those_of_the_weights(name):
    def draw(seed):
        torch.manual_seed(seed)
        return model_of(name, WIDE, LAYERS)

    data = si.observe_branches(draw, inputs(), networks=2)
    post = si.fit(si.models.branches, data, key=jr.key(1))
    declared = BlockOrder.of(si.blocks.of(draw(0), inputs(), recipe="auto"), depth=1).strengths
    table, check = si.summarise(post), si.check(post, data)
    z = [
        np.log(table.loc[site, "mean"] / g) * table.loc[site, "mean"] / table.loc[site, "sd"]
        for site, g in declared.items()
    ]
    print(f"\n{name}: z of strengths {', '.join(f'{value:.1f}' for value in z)}; {check.verdict}")
    assert_within(np.array(z), "strengths")
    assert check.passed, check.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", TODAY)
def test_tuned_models_of_today_keep_promises(name, record):
    """The mean log norm and the mean correlation of networks with weights are those of the chain."""
    torch.manual_seed(0)
    model = model_of(name, SMALL, LAYERS)
    kind = "output_gain" if blocks_of(name, SMALL).layers[0].output_norm else "strength"
    tuned = si.tune(
        model,
        inputs(),
        maximise=kind,
        subject_to=of.probability(of.NormFactor(), below=3) >= 0.9,
        fixed={"temperature": 0.5, "gain": 1.0},
        paths=PATHS,
        key=jr.key(1),
    )
    audit = tuned.initialise(model, inputs(), seed=1).audit
    assert audit.passed, audit.verdict
    V0 = tuned.problem.V0[0]
    after = []
    for seed in range(INITIALISATIONS):
        tuned.initialise(model, inputs(), seed=100 + seed, audited=False)
        after.append(_last_state(model))
    sizes = {"width": SMALL, "depth": LAYERS, "observe_every": LAYERS, "networks": PATHS}
    chains = si.sample_networks(tuned.layer, V0, **sizes, key=jr.key(2))["covariance"].values[:, 1]
    cells = [f"{tuned.values[kind]:.3f}"]
    for what, (promised, its_error), (measured, error) in zip(
        ("log norm", "correlation"), *(_moments(V, V0) for V in (chains, np.stack(after))), strict=True
    ):
        both = np.hypot(its_error, error)
        cells.append(f"{promised:.3f}, {measured:.3f} ({both:.3f})")
        print(f"\n{name}, {what}: promised, {INITIALISATIONS} initialisations (error): {cells[-1]}")
        assert_estimate(measured, promised, both)
    record("promises_of_blocks", {name: cells})


def _last_state(model) -> np.ndarray:
    """V before the last norm of the model."""
    states = []
    names = ("norm", "final_layer_norm", "final_layernorm")
    norm = next(module for name, module in model.named_modules() if name in names)
    handle = norm.register_forward_pre_hook(lambda module, arguments: states.append(arguments[0][0]))
    run(model, inputs())
    handle.remove()
    return covariances(states)[0]


def _moments(V, V0) -> list[tuple]:
    """The mean log norm over tokens and the mean correlation over pairs, each with its Monte Carlo error."""
    return [mean_and_error(values) for values in log_norms_and_correlations(V, V0).T]
