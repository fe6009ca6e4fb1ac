"""Which architecture made the data."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from conftest import WARMUP
from jaxtyping import Array, Float

import sdeinfer as si
from sdeinfer.infer._compare import _kinds, _labelled
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import USED, FullPath, observed_path, path_layout, path_statistics
from sdeinfer.parameters import GAMMA

LAYERS = {
    "transformer": si.ShapedTransformer(0.6, 0.8, 1.0, -1.0),
    "attention": si.ShapedAttention(0.6, 0.8),
    "feedforward": si.ResidualFeedForward(0.6, 1.0, -1.0),
    "mlp": si.ShapedMLP(1.0, -1.0),
}
SIZES = {"chains": 2, "draws": 200, "warmup": WARMUP}
KINDS = ["mlp", "feedforward"]


def networks(layer, count: int, depth: int, width: int = 128) -> xr.Dataset:
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.2)
    layer = LAYERS[layer] if isinstance(layer, str) else layer
    return si.sample_networks(layer, V0, width=width, depth=depth, networks=count, key=jr.key(3))


def ranked(data: xr.Dataset, **options):
    return si.compare(si.models.full_path, data, **SIZES | {"key": jr.key(0)} | options)


@pytest.fixture(scope="module")
def feedforward():
    """Networks of feed-forward layers, and the table of them."""
    data = networks("feedforward", 24, 10)
    return data, ranked(data, architectures=KINDS, law="limit")


def test_an_architecture_that_cannot_be_is_ranked_last(feedforward):
    # A feed-forward layer of γ = 0.71 has the noise of an MLP, but an MLP never has that of another γ.
    _, table = feedforward
    assert table.index[-1] == "mlp"
    assert table.loc["mlp", "elpd_diff"] < 0
    assert 0 < table.loc["feedforward", "p"] < 4


def test_densities_are_those_of_the_covariances(feedforward):
    data, table = feedforward
    path = observed_path(data)
    statistics = path_statistics(path, path_layout(path))
    law = LAYERS["feedforward"].limit()
    at_truth = np.asarray(FullPath(law, statistics).log_prob(statistics.weights))
    # Of networks that were left out it is that at the truth, less about a half for every parameter; those of the limit
    # and of this width differ by several.
    assert abs(table.loc["feedforward", "elpd"] - at_truth.sum()) < 10


@pytest.mark.slow
def test_narrow_networks_count_their_parameters_once():
    """At n = 32 the posterior is nearly twice as wide as that of independent normals; the weights must know that."""
    table = ranked(networks(si.ResidualFeedForward(0.95, 1.0, -1.0), 64, 8, width=32), architectures=KINDS)
    # Three parameters; weights that do not know it gave 11.
    assert table.loc["feedforward", "p"] < 6


@pytest.mark.slow
def test_a_network_without_a_used_transition_is_left_out():
    data = networks("feedforward", 6, 4)
    used = np.ones((6, 5), bool)
    used[2] = False
    table = ranked(data.assign({USED: (("network", "layer"), used)}), architectures=KINDS)
    assert np.isfinite(table["elpd"]).all()


@pytest.mark.slow
def test_densities_too_large_to_be_exponentiated_have_weights():
    """Of small networks' covariances in small units: e^elpd of one network is above the largest double."""
    data = networks("feedforward", 6, 24)
    one, other = (
        ranked(data.assign(covariance=data["covariance"] * unit), architectures=KINDS) for unit in (1.0, 1e-4)
    )
    assert other["elpd"].max() / 6 > 710
    # An MLP cannot be, by every network.
    assert min(one.loc["feedforward", "weight"], other.loc["feedforward", "weight"]) > 0.99
    # In other units densities have another constant, of 6 entries, 24 layers and 6 networks. Rounding makes other draws
    # of the same posterior, 400 in each fit: 0.1 of Monte Carlo error.
    np.testing.assert_allclose(other["elpd"] - one["elpd"], 6 * 24 * 6 * np.log(1e4), rtol=0, atol=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architectures": ["mlp"]}, "architectures: two or more different ones are needed, got mlp"),
        ({"architectures": ["mlp", "gpt"]}, "architecture: must be one of .* got 'gpt'"),
        ({"architectures": ["mlp", "mlp"]}, "architectures: two or more different ones are needed"),
        ({"architectures": "mlp"}, "architectures: a list of them is needed, got 'mlp'"),
        ({"law": "both"}, "law: must be one of finite-width, limit, got 'both'"),
        ({"draws": 0}, "draws: a whole number of at least 1 is needed, got 0"),
        ({"largest_logit": 0.0}, "largest_logit: must be positive"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ranked(networks("mlp", 4, 3), **options)


def test_one_network_and_one_token_say_what_is_missing():
    data = networks("mlp", 2, 3)
    with pytest.raises(ValueError, match="two networks inside the range of the law are needed, .* there are 1"):
        ranked(data.isel(network=[0]), architectures=KINDS)
    with pytest.raises(ValueError, match="transformer has tau0, which one token cannot identify"):
        ranked(data.isel(token_a=[0], token_b=[0]), architectures=["mlp", "transformer"])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_architecture_that_made_the_data_is_preferred(name):
    """256 networks of width 128 and depth 32."""
    table = ranked(networks(name, 256, 32))
    print(f"\nmade by {name}:\n{table[['elpd_diff', 'dse', 'weight', 'p']].to_string()}")
    assert table.index[0] == name


class Linear(si.layers.AbstractLayer):
    """A custom layer with linear noise only."""

    gamma: Float[Array, ""] = GAMMA.field()

    def forward(self, X, *, key):
        return X

    def limit(self):
        zero = jnp.zeros_like(self.gamma)
        return si.layers.Limit(zero, zero, self.gamma**2 * (2 - self.gamma**2), zero)


def test_types_of_layers_are_compared():
    data, sizes = networks("mlp", 4, 3), {"law": "limit", "chains": 1, "draws": 30}
    with pytest.raises(si.InputError, match="two or more different ones are needed, got mlp"):
        ranked(data, architectures=["mlp", si.ShapedMLP], **sizes)
    table = ranked(data, architectures=[si.ShapedMLP, Linear], **sizes)
    assert set(table.index) == {"mlp", "Linear"}
    assert np.isfinite(table["elpd"]).all()


def test_sizes_of_one_architecture_are_told_apart_and_layers_of_one_name_are_numbered():
    of_sizes = _kinds(networks("mlp", 2, 2), [*KINDS, Architecture("feedforward", expansion=4)])
    assert list(_labelled(of_sizes)) == ["mlp", "feedforward", "feedforward, expansion 4"]
    parts = (si.ShapedMLP(1.0, -1.0), LAYERS["feedforward"])
    kinds = [si.layers.kind_of(si.Stack(each)) for each in (parts, parts[:1])]
    assert list(_labelled(kinds)) == ["Stack 1", "Stack 2"]


@pytest.mark.parametrize("architectures", [["attention", "mlp"], [Architecture("attention"), "mlp"]])
def test_observed_networks_are_compared_by_their_mask(architectures):
    masked = networks("feedforward", 2, 2).assign_attrs(si.CAUSAL.attributes())
    del masked.attrs["architecture"]
    assert _kinds(masked, architectures) == [Architecture("attention", pattern=si.CAUSAL), Architecture("mlp")]
