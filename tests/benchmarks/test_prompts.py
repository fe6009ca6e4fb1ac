"""What a batch of prompts tells: relative posterior sds of γ and τ0, of 32 networks of n = 256 and depth 16."""

import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si

TRUTH = {"gamma": 0.6, "tau0": 1.0}
CASES = {
    "4 prompts of 3 tokens, 32 networks": (si.Pattern(prompts=(3, 3, 3, 3)), 12, 32),
    "1 prompt of 12 tokens, 32 networks": (si.Pattern(), 12, 32),
    "1 prompt of 3 tokens, 128 networks": (si.Pattern(), 3, 128),
}


@pytest.mark.benchmark
@pytest.mark.parametrize("name", CASES)
def test_what_prompts_tell(name, key):
    """Means over three data sets."""
    pattern, tokens, networks = CASES[name]
    layer = si.ShapedTransformer(**TRUTH, c_plus=2.0, c_minus=-2.0, pattern=pattern)
    V0, sds = si.equicorrelated(tokens=tokens, correlation=0.1, norm=2.2), []
    for seed in range(3):
        key_data, key_fit = jr.split(jr.fold_in(key, seed))
        data = si.sample_networks(layer, V0, width=256, depth=16, networks=networks, key=key_data)
        posterior = si.fit(si.models.full_path, data, predictions=None, key=key_fit)["posterior"]
        sds.append([float(posterior[site].std()) / truth for site, truth in TRUTH.items()])
    gamma, tau0 = np.mean(sds, axis=0)
    print(f"\n{name}: gamma ± {gamma:.2%}, tau0 ± {tau0:.1%}")
