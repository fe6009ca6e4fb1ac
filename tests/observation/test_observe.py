"""Hidden states of every form that users have."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si


@pytest.fixture
def X() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, 4, 2, 8))


class OnlyDLPack:
    """An array of a library that NumPy knows nothing of."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def layers_of(X):
    return [X[:, layer] for layer in range(X.shape[1])]


FORMS = {
    "array": lambda X: X,
    "jax": jnp.asarray,
    "data array": xr.DataArray,
    "nested lists": lambda X: X.tolist(),
    "list of layers": layers_of,
    "tuple of layers of jax": lambda X: tuple(map(jnp.asarray, layers_of(X))),
    "generator": lambda X: (each for each in layers_of(X)),
    "DLPack": lambda X: OnlyDLPack(jnp.asarray(X)),
    "layers by DLPack": lambda X: [OnlyDLPack(jnp.asarray(each)) for each in layers_of(X)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_one_dataset(X, form):
    data = si.observe(FORMS[form](X))
    np.testing.assert_allclose(data["covariance"], X @ np.swapaxes(X, -1, -2) / 8, rtol=1e-12)
    assert data["covariance"].dims == ("network", "layer", "token_a", "token_b")
    assert data["width"].values.tolist() == [8] * 3
    assert data["layer"].values.tolist() == [0, 1, 2, 3]
    xr.testing.assert_identical(data.drop_vars("covariance"), si.observe(X).drop_vars("covariance"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int16])
@pytest.mark.parametrize("through", [np.asarray, jnp.asarray, lambda X: OnlyDLPack(jnp.asarray(X))])
def test_every_type_is_accumulated_in_double_precision(X, dtype, through):
    rounded = (2 * X).astype(dtype)
    exact, found = rounded.astype(np.float64), si.observe(through(rounded))["covariance"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, exact @ exact.mT / 8, rtol=1e-14, atol=1e-14)


def test_an_observer_takes_one_layer_at_a_time(X):
    observer = si.Observer(width=8)
    for state in layers_of(X):
        observer.add(state)
    xr.testing.assert_identical(observer.dataset(), si.observe(X))
    again, state = si.Observer(), np.empty_like(X[:, 0])
    for each in layers_of(X):
        state[:] = each
        again.add(state)
    xr.testing.assert_identical(observer.dataset(), again.dataset())


def test_the_shortcut_is_the_regression_of_a_state_on_the_one_before(X):
    """For all tokens and features of a network together, without an intercept."""
    data = si.observe(X)
    assert data["shortcut"][:, 0].isnull().all()
    for network, states in enumerate(X):
        for layer in range(1, len(states)):
            slope = np.linalg.lstsq(states[layer - 1].reshape(-1, 1), states[layer].reshape(-1), rcond=None)[0]
            np.testing.assert_allclose(data["shortcut"][network, layer], slope[0], rtol=1e-12)


def test_prompts_of_a_network_have_one_covariance(X):
    prompts = X.reshape(1, 3, 4, 2, 8).swapaxes(1, 2)
    data = si.observe(prompts)
    tokens = prompts.reshape(1, 4, 6, 8)
    assert data.attrs == {"prompts": "2,2,2", "tokens": 6}
    np.testing.assert_allclose(data["covariance"], tokens @ tokens.swapaxes(-1, -2) / 8, rtol=1e-12)
    xr.testing.assert_identical(si.observe(layers_of(prompts)), data)
    xr.testing.assert_identical(si.observe(tokens, pattern=si.Pattern(prompts=(2, 2, 2))), data)
    xr.testing.assert_allclose(si.observe(prompts, prompts=1), si.observe(X[1:2]))
    assert si.observe(prompts, prompts=[1]).attrs == {"tokens": 2}
    assert si.observe(prompts, prompts=[0, 2], pattern=si.CAUSAL, tokens=[0]).attrs == {
        "causal": 1.0,
        "prompts": "1,1",
        "tokens": 2,
    }
    assert si.observe(prompts, tokens=[0]).attrs == {"incomplete": 1.0, "tokens": 3}


def test_prompts_and_tokens_are_taken_from_covariances(X):
    prompts = np.concatenate([X, X + 1, X - 1], axis=2).reshape(3, 4, 3, 2, 8)
    data = si.observe(prompts, pattern=si.CAUSAL)
    xr.testing.assert_identical(si.take(data), data)
    part = si.observe(prompts, prompts=[0, 2], pattern=si.CAUSAL, tokens=[0])
    xr.testing.assert_allclose(
        *(each.drop_vars("shortcut") for each in (si.take(data, prompts=[2, 0], tokens=1), part))
    )
    assert si.take(data, prompts=[2, 0], tokens=1).attrs == part.attrs
    left_out = si.take(si.observe(prompts), tokens=1)
    assert left_out.attrs == {"incomplete": 1.0, "tokens": 3}
    with pytest.raises(si.InputError, match="tokens: attention attends to tokens that were left out"):
        si.prepare(si.models.full_path, left_out, architecture="attention")


def test_a_subset_of_the_tokens(X):
    whole = si.observe(X)
    for tokens in ([1], 1, -1, slice(1, None), [False, True]):
        part = whole.isel(token_a=[1], token_b=[1]).drop_vars("shortcut")
        xr.testing.assert_allclose(si.observe(X, tokens=tokens).drop_vars("shortcut"), part, rtol=1e-14)
    reverse = si.observe(X, tokens=[1, 0])
    np.testing.assert_allclose(reverse["covariance"], whole["covariance"].values[..., ::-1, ::-1], rtol=1e-14)


def test_layers_have_the_numbers_that_are_given(X):
    assert si.observe(X, layers=[0, 8, 16, 24])["layer"].values.tolist() == [0, 8, 16, 24]


def residual(networks, layers, seed=1, tokens=2, width=32, *, shared=False):
    """Hidden states of layers of strength 0.5, from tokens of each network's own or shared ones."""
    rng = np.random.default_rng(seed)
    X = [np.broadcast_to(rng.normal(size=(1 if shared else networks, tokens, width)), (networks, tokens, width))]
    for _ in range(layers - 1):
        W = rng.normal(size=(networks, width, width)) / np.sqrt(width)
        X.append(np.sqrt(0.75) * X[-1] + 0.5 * X[-1] @ W)
    return np.stack(X, axis=1)


OF_ONE_INPUT = residual(6, 5, shared=True)


@pytest.mark.parametrize(
    "hidden_states",
    [list(residual(6, 5)), residual(6, 5).swapaxes(0, 1), OF_ONE_INPUT.swapaxes(0, 1)],
    ids=["a list of networks", "swapped", "swapped, of one input"],
)
def test_networks_in_the_place_of_layers_are_refused(hidden_states):
    with pytest.raises(si.InputError, match="states are closer along the networks than along the layers: one array "):
        si.observe(hidden_states)


@pytest.mark.parametrize("X", [residual(6, 5), OF_ONE_INPUT], ids=["of their own inputs", "of one input"])
def test_networks_in_their_place_are_not(X):
    xr.testing.assert_identical(si.observe(layers_of(X)), si.observe(X))
    prompts = np.concatenate([X, residual(6, 5, seed=2)], axis=2).reshape(6, 5, 2, 2, 32)
    xr.testing.assert_identical(si.observe(layers_of(prompts)), si.observe(prompts))


def test_labels_of_networks_are_kept(X):
    labels = {"network": ["a", "b", "c"], "group": ("network", [0, 1, 1]), "layer": [0, 2, 4, 6]}
    named = xr.DataArray(X, dims=("network", "layer", "token", "width"), coords=labels)
    data = si.observe(named)
    assert data["network"].values.tolist() == ["a", "b", "c"]
    assert data["group"].values.tolist() == [0, 1, 1]
    layers = [named.isel(layer=number) for number in range(4)]
    xr.testing.assert_identical(si.observe(layers, layers=labels["layer"]).drop_vars("layer"), data.drop_vars("layer"))
    again = si.covariance_dataset(data["covariance"].transpose("token_a", "token_b", "layer", "network"), width=8)
    xr.testing.assert_identical(again, data.drop_vars("shortcut"))
