"""Arguments of another type, and lengths that do not fit: one line that names the argument."""

from functools import partial

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array, Float

import sdeinfer as si
from sdeinfer.parameters import GAMMA

LAYER = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-1.0)
V0 = np.eye(2)
V = np.arange(1.0, 13.0).reshape(3, 4, 1, 1) * V0
DATA = si.covariance_dataset(V, width=8)
FULL_PATH, KEY = si.models.full_path, jr.key(0)

simulate = partial(si.simulate, LAYER, V0, [0.1])
sample = partial(si.sample_networks, LAYER, V0, width=32, depth=2)
fit = partial(si.fit, FULL_PATH, DATA)
tune = partial(si.tune, "transformer", V0, maximise="gamma")

REFUSED = [
    (lambda: si.check("post.nc"), "post: the result of a fit, .* is needed, got 'post.nc'"),
    (lambda: si.summarise(DATA), "post: the result of a fit, .* is needed, got a Dataset"),
    (lambda: si.simulate("transformer", V0, [0.1], paths=2, key=KEY), "layer: a layer, .* got 'transformer'"),
    (lambda: si.simulate(LAYER, DATA, [0.1], paths=2, key=KEY), "V0: a square matrix .* got a Dataset"),
    (lambda: si.simulate(LAYER, V0, "now", paths=2, key=KEY), "ts: a non-empty list of finite times .* got 'now'"),
    (lambda: simulate(paths=1e2, key=KEY), "paths: a whole number is needed, got 100.0"),
    (lambda: simulate(paths=2, key=0), r"key: a key, as jax.random.key\(0\), is needed, got 0"),
    (lambda: simulate(paths=2, step="long", key=KEY), "step: a number is needed, got 'long'"),
    (lambda: si.simulate_stopped(LAYER, V0, [0.1], within=3, paths=2, key=KEY), "within: a pair is needed, got 3"),
    (lambda: si.fit("full_path", DATA, key=KEY), "model: a NumPyro program is needed, .* got 'full_path'"),
    (lambda: si.fit(DATA, FULL_PATH, key=KEY), "model: a model, as si.models.full_path, .* is needed, got a Dataset"),
    (lambda: si.prepare(LAYER, DATA), "model: a NumPyro program is needed, .* got a ShapedTransformer"),
    (lambda: fit(architecture=5, key=KEY), "architecture: a name or a layer, .* got 5"),
    (lambda: fit(prior=[1], key=KEY), r"prior: a dict is needed, got \[1\]"),
    (lambda: fit(largest_logit="large", key=KEY), "largest_logit: a number is needed"),
    (lambda: fit(sampler=si.NUTS, key=KEY), r"sampler: a sampler, as si.NUTS\(\), is needed"),
    (lambda: si.NUTS(draws=1.5), "draws: a whole number of at least 1 is needed, got 1.5"),
    (lambda: tune(width="64", depth=8, key=KEY), "width: a whole number is needed, got '64'"),
    (lambda: si.transfer("tuned", widths=[8], depths=[2], key=KEY), "tuned: the result of si.tune is needed"),
    (lambda: si.observe_outputs("x", V0, width=8, depth=2), "outputs: an array is needed, got the path .x.: read"),
    (lambda: si.take("data.nc"), "data: a Dataset"),
    (lambda: si.read(5), "path: a name or a path is needed, got 5"),
    (lambda: si.equicorrelated(tokens="3", correlation=0.0), "tokens: a whole number is needed, got '3'"),
    (lambda: si.ShapedAttention(gamma="half", tau0=1.0), "gamma: a real scalar is needed, got 'half'"),
    (lambda: si.layers.template("transformer", heads="two"), "heads: a whole number of at least 1 is needed"),
    (lambda: si.Stack(5), "layers: a layer is needed, got 5"),
]

LENGTHS = [
    (lambda: si.covariance_dataset(V, width=[8, 8]), r"width: one number, or one for each of 3 networks, .* got \[8, "),
    (lambda: si.observe_outputs(np.ones((2, 2, 3)), V0, width=[8] * 3, depth=2), "width: one number, or one for each "),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"), [*REFUSED, *LENGTHS], ids=lambda each: each if isinstance(each, str) else ""
)
def test_one_line_names_the_argument(call, message):
    with pytest.raises(si.InputError, match=f"^{message}") as refusal:
        call()
    assert len(str(refusal.value).splitlines()) == 1


def custom(limit) -> si.layers.AbstractLayer:
    """A layer of a user, with this limit."""

    class Custom(si.layers.AbstractLayer):
        gamma: Float[Array, ""] = GAMMA.field()

        def forward(self, X, *, key):
            return X

        def limit(self):
            return limit(self.gamma)

    return Custom(gamma=0.5)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (lambda gamma: (0.0, 0.0, gamma, 0.0), "layer: limit of Custom must return a si.layers.Limit, got a tuple"),
        (lambda gamma: si.layers.Limit(gamma, gamma, -gamma, gamma), "linear_noise of the limit of Custom must not be"),
        (lambda gamma: si.layers.Limit(gamma, gamma, gamma, -gamma), "attention_noise of the limit of Custom must not"),
    ],
)
def test_limits_of_custom_layers_are_checked(limit, message):
    layer = custom(limit)
    with pytest.raises(si.InputError, match=message):
        si.simulate(layer, V0, [0.1], paths=2, key=KEY)
    with pytest.raises(si.InputError, match=message):
        si.fit(FULL_PATH, DATA, architecture=layer, law="limit", key=KEY)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_and_jax_are_whole_numbers():
    assert si.equicorrelated(tokens=np.int64(2), correlation=np.float32(0.5)).shape == (2, 2)
    with pytest.raises(si.InputError, match="paths: a whole number of at least 1 is needed, got 0"):
        simulate(paths=jnp.int32(0), key=jr.PRNGKey(0))
