"""Hidden states of every form that users have."""

import jax.numpy as jnp
import jax.random as jr
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
def test_every_type_is_accumulated_in_single_precision_at_least(X, dtype, through):
    rounded = (2 * X).astype(dtype)
    data = si.observe(through(rounded))
    exact = rounded.astype(np.float64)
    assert data["covariance"].dtype == (np.float64 if dtype is np.float64 else np.float32)
    np.testing.assert_allclose(data["covariance"], exact @ np.swapaxes(exact, -1, -2) / 8, rtol=0, atol=1e-5)


def test_an_observer_takes_one_layer_at_a_time(X):
    observer = si.Observer(width=8)
    for state in layers_of(X):
        observer.add(state)
    xr.testing.assert_identical(observer.dataset(), si.observe(X))


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


def test_what_is_wrong_with_prompts(X):
    prompts = X.reshape(1, 3, 4, 2, 8).swapaxes(1, 2)
    for make, message in (
        (lambda: si.observe(X, prompts=[0]), "prompts: the hidden states have no dimension of prompts"),
        (lambda: si.observe(prompts, prompts=3), "prompts: cannot choose among 3 prompts by 3 "),
        (lambda: si.observe(X, pattern=si.Pattern(prompts=(1, 2))), r"pattern: prompts of 1 \+ 2 tokens for 2 tokens"),
        (lambda: si.observe(prompts, pattern=si.Pattern.of_mask([[1, 0], [1, 1]])), "pattern: prompts are masked by"),
    ):
        with pytest.raises(si.InputError, match=message):
            make()
    old = xr.concat([si.observe(X), si.observe(X)], "prompt")
    with pytest.raises(si.InputError, match="share its weights, so they are not independent networks: observe their"):
        si.validate(old)


def test_prompts_and_tokens_are_taken_from_covariances(X):
    prompts = np.concatenate([X, X + 1, X - 1], axis=2).reshape(3, 4, 3, 2, 8)
    data = si.observe(prompts, pattern=si.CAUSAL)
    xr.testing.assert_identical(si.take(data), data)
    part = si.observe(prompts, prompts=[0, 2], pattern=si.CAUSAL, tokens=[0])
    xr.testing.assert_allclose(si.take(data, prompts=[2, 0], tokens=1), part)
    assert si.take(data, prompts=[2, 0], tokens=1).attrs == part.attrs
    left_out = si.take(si.observe(prompts), tokens=1)
    assert left_out.attrs == {"incomplete": 1.0, "tokens": 3}
    with pytest.raises(si.InputError, match="tokens: attention attends to tokens that were left out"):
        si.prepare(si.models.full_path, left_out, architecture="attention")
    for options, message in (
        ({"prompts": [3]}, "prompts: some of 0 to 2 are needed"),
        ({"tokens": 0}, "tokens: a "),
    ):
        with pytest.raises(si.InputError, match=message):
            si.take(data, **options)


def test_a_subset_of_the_tokens(X):
    whole = si.observe(X)
    for tokens in ([1], 1, -1, slice(1, None), [False, True]):
        xr.testing.assert_allclose(si.observe(X, tokens=tokens), whole.isel(token_a=[1], token_b=[1]), rtol=1e-14)
    reverse = si.observe(X, tokens=[1, 0])
    np.testing.assert_allclose(reverse["covariance"], whole["covariance"].values[..., ::-1, ::-1], rtol=1e-14)
    with pytest.raises(si.InputError, match="^tokens: cannot choose among 2 tokens by 2 "):
        si.observe(X, tokens=2)
    for tokens in ([0, 0], []):
        with pytest.raises(si.InputError, match="^tokens: at least one of the tokens, and each only once, is needed"):
            si.observe(X, tokens=tokens)


def test_layers_have_the_numbers_that_are_given(X):
    assert si.observe(X, layers=[0, 8, 16, 24])["layer"].values.tolist() == [0, 8, 16, 24]
    with pytest.raises(si.InputError, match=r"layers: one number for each of 4 layers is needed, got \[0, 8\]"):
        si.observe(X, layers=[0, 8])


def changed(X, place, value):
    X = X.copy()
    X[place] = value
    return X


BAD = {
    "another shape": (lambda X: X[0, 0], r"shape \(networks, layers, tokens, width\), or .* is needed, got \(2, 8\)"),
    "a layer of another shape": (
        lambda X: [X[:, 0], X[:, 1], X[:, 2, :1]],
        r"layer 2: has shape \(3, 1, 8\), where the first has \(3, 2, 8\)",
    ),
    "layers of two dimensions": (lambda X: list(X[0]), r"layer 0: shape \(networks, tokens, width\) or .*got \(2, 8\)"),
    "NaN": (lambda X: changed(X, (1, 2, 0, 3), np.nan), "layer 2, network 1: 1 entries are NaN or infinite"),
    "infinite": (lambda X: changed(X, (2, 0, 1), np.inf), "layer 0, network 2: 8 entries are NaN or infinite"),
    "a prompt with NaN": (
        lambda X: changed(X, (0, 3, 1), np.nan)[None].swapaxes(1, 2),
        "layer 3, network 0, prompt 0: 8 entries are NaN",
    ),
    "too large": (lambda X: changed(X, (0, 1), 1e200), "layer 1, network 0: XXᵀ overflows float64"),
    "few features": (lambda X: X[..., :1], "layer 0: 1 features for 2 tokens make the covariance singular"),
    "complex": (lambda X: X + 1j, "layer 0: real numbers are needed, got complex128"),
    "truth values": (lambda X: X > 0, "layer 0: real numbers are needed, got bool"),
    "strings": (lambda X: X.astype(str), "layer 0: real numbers are needed, got <U"),
    "a file's name": (lambda X: "X.npy", "real numbers are needed, got <U5"),
    "nothing": (lambda X: None, "cannot be read as an array"),
    "ragged": (lambda X: [[1.0], [1.0, 2.0]], "cannot be read as an array"),
    "no layer": (lambda X: [], "no layer was given"),
    "an empty dimension": (lambda X: X[:, :, :0], "shape .* is needed, got"),
    "masked entries": (lambda X: np.ma.masked_greater(X, X.max() - 1e-9), "layer .: 1 entries are masked"),
    "masked entries of a layer": (
        lambda X: [X[:, 0], np.ma.masked_greater(X[:, 1], 10), np.ma.masked_less(X[:, 2], 10)],
        "layer 2: 48 entries are masked",
    ),
    "small": (lambda X: 1e-200 * X, "layer 0, network 0: XXᵀ is below the range of float64"),
}


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
    ("hidden_states", "axis"),
    [
        ([residual(6, 5), residual(6, 5, seed=2)], "prompts"),
        ([each[None] for each in residual(6, 5)], "prompts"),
        (list(residual(6, 5)), "networks"),
        (residual(6, 5).swapaxes(0, 1), "networks"),
        (OF_ONE_INPUT.swapaxes(0, 1), "networks"),
    ],
    ids=["a list of runs", "a list of networks with an axis", "a list of networks", "swapped", "swapped, of one input"],
)
def test_networks_in_the_place_of_layers_are_refused(hidden_states, axis):
    with pytest.raises(si.InputError, match=f"states are closer along the {axis} than along the layers: one array "):
        si.observe(hidden_states)


@pytest.mark.parametrize("X", [residual(6, 5), OF_ONE_INPUT], ids=["of their own inputs", "of one input"])
def test_networks_in_their_place_are_not(X):
    xr.testing.assert_identical(si.observe(layers_of(X)), si.observe(X))
    prompts = np.concatenate([X, residual(6, 5, seed=2)], axis=2).reshape(6, 5, 2, 2, 32)
    xr.testing.assert_identical(si.observe(layers_of(prompts)), si.observe(prompts))


def test_prompts_that_are_close_are_declared():
    prompts = residual(2, 4)[:, :, None] + 0.1 * np.random.default_rng(2).normal(size=(2, 4, 3, 2, 32))
    with pytest.raises(si.InputError, match="if these are prompts, say so by prompts=slice"):
        si.observe(layers_of(prompts))
    xr.testing.assert_identical(si.observe(layers_of(prompts), prompts=slice(None)), si.observe(prompts))


def test_labels_of_networks_are_kept(X):
    labels = {"network": ["a", "b", "c"], "group": ("network", [0, 1, 1]), "layer": [0, 2, 4, 6]}
    named = xr.DataArray(X, dims=("network", "layer", "token", "width"), coords=labels)
    data = si.observe(named)
    assert data["network"].values.tolist() == ["a", "b", "c"]
    assert data["group"].values.tolist() == [0, 1, 1]
    layers = [named.isel(layer=number) for number in range(4)]
    xr.testing.assert_identical(si.observe(layers, layers=labels["layer"]).drop_vars("layer"), data.drop_vars("layer"))
    again = si.covariance_dataset(data["covariance"].transpose("token_a", "token_b", "layer", "network"), width=8)
    xr.testing.assert_identical(again, data)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("pattern", ["causal", np.tril(np.ones((2, 2), bool))], ids=["name", "matrix"])
def test_a_pattern_is_one(X, pattern, unchecked):
    makes = (
        lambda: si.observe(X, pattern=pattern),
        lambda: si.ShapedAttention(gamma=0.5, tau0=1.0, pattern=pattern),
        lambda: si.Architecture("transformer", pattern=pattern),
        lambda: si.blocks.SelfAttention(pattern=pattern),
    )
    for make in makes:
        with pytest.raises(
            si.InputError, match=r"^pattern: a pattern, as si.CAUSAL or si.Pattern.of_mask\(matrix\), is"
        ):
            make()
    with pytest.raises(si.InputError, match=r"^prompts: their numbers of tokens, as \(3, 5\), are needed, got 3"):
        si.Pattern(prompts=3)


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(X, what):
    make, message = BAD[what]
    with pytest.raises(si.InputError, match=f"^hidden_states: .*{message}|^hidden_states: {message}") as refusal:
        si.observe(make(X))
    assert "\n" not in str(refusal.value)


def test_a_width_must_be_positive(X):
    with pytest.raises(si.InputError, match="^width: a whole number of at least 1 is needed, got 0"):
        si.observe(X, width=0)


def test_a_single_layer_has_no_transition():
    with pytest.raises(si.InputError, match="at least 2 layers are needed"):
        si.observe(jr.normal(jr.key(0), (2, 1, 2, 8)))
