"""What cannot be observed, or is no Dataset: one line that says what is wrong and where."""

import functools

import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer.observation import branches_dataset, joined_branches, validate_branches

X = np.random.default_rng(0).normal(size=(3, 4, 2, 8))
PROMPTS = X.reshape(1, 3, 4, 2, 8).swapaxes(1, 2)
LAYERS = [X[:, layer] for layer in range(4)]
KINDS = ("attention", "mlp", "attention", "mlp")
U = np.random.default_rng(0).normal(size=(2, 4, 3, 8)) + 0.3
D = 0.1 * np.random.default_rng(1).standard_t(4, size=(2, 4, 3, 8))
OF_TWO = np.cumsum(np.concatenate([U[:, :1], D], axis=1), axis=1)


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def cov(place=None, value=None, **width):
    """Covariances of X, with some entries replaced."""
    V = X @ X.swapaxes(-1, -2) / 8
    data = si.covariance_dataset(V, width=8)
    if place is not None:
        data["covariance"][place] = value(V) if callable(value) else value
    return data.assign_coords(width=("network", width["width"])) if width else data


def network(u=U[0], d=D[0], **settings):
    """One network, branch by branch; its branches are named attention.0, mlp.1, attention.2 and mlp.3."""
    observer = si.BranchObserver(**settings)
    for one, added, kind in zip(u, d, KINDS, strict=False):
        observer.add(one, added, kind=kind)
    return observer


@functools.cache
def branches():
    return joined_branches([network(*each) for each in zip(U, D, strict=True)])


def with_entry(name, value, **place):
    data = branches().copy(deep=True)
    data[name][place] = value
    return data


HIDDEN_STATES = [
    (lambda: X[0, 0], r"shape \(networks, layers, tokens, width\), or .* is needed, got \(2, 8\)"),
    (lambda: [*LAYERS[:2], X[:, 2, :1]], r"layer 2: has shape \(3, 1, 8\), where the first has \(3, 2, 8\)"),
    (lambda: list(X[0]), r"layer 0: shape \(networks, tokens, width\) or .*got \(2, 8\)"),
    (lambda: changed(X, (1, 2, 0, 3), np.nan), "layer 2, network 1: 1 entries are NaN or infinite"),
    (lambda: changed(X, (0, 3, 1), np.nan)[None].swapaxes(1, 2), "layer 3, network 0: 8 entries are NaN"),
    (lambda: changed(X, (0, 1), 1e200), "layer 1, network 0: XXᵀ overflows float64"),
    (lambda: X[..., :1], "layer 0: 1 features for 2 tokens make the covariance singular"),
    (lambda: X + 1j, "layer 0: real numbers are needed, got complex128"),
    (lambda: "X.npy", "an array is needed, got the path .X.npy.: read it first, as by numpy.load"),
    (lambda: {"block_0": X}, "an array is needed, got a dict of block_0"),
    (lambda: X[0], "is needed, got .*: of one network give hidden_states.None."),
    (lambda: None, "cannot be read as an array"),
    (lambda: [], "no layer was given"),
    (lambda: np.ma.masked_greater(X, X.max() - 1e-9), "layer .: 1 entries are masked"),
]
OBSERVED = [
    (lambda: si.observe(1e-200 * X), "covariance: network 0, layer 0: the covariance is zero"),
    (lambda: si.observe(X, width=0), "width: a whole number of at least 1 is needed, got 0"),
    (lambda: si.observe(X, width=32), "width: hidden_states: layer 0 has 8 features, got width 32"),
    (lambda: si.observe(X[:, :1]), "covariance: at least 2 layers are needed"),
    (lambda: si.observe(X, layers=[0, 8]), r"layers: one number for each of 4 layers is needed, got \[0, 8\]"),
    (lambda: si.observe(X, tokens=2), "tokens: cannot choose among 2 tokens by 2 "),
    (lambda: si.observe(X, tokens="a"), "tokens: indices, a mask or a slice are needed, got 'a'"),
    (lambda: si.observe(X, tokens=[0, 0]), "tokens: at least one of the tokens, and each only once, is needed"),
    (lambda: si.observe(X, prompts=[0]), "prompts: the hidden states have no dimension of prompts"),
    (lambda: si.observe(PROMPTS, prompts=3), "prompts: cannot choose among 3 prompts by 3 "),
    (lambda: si.take(si.observe(PROMPTS), prompts=[3]), "prompts: some of 0 to 2 are needed"),
    (lambda: si.take(si.observe(PROMPTS), tokens=0), "tokens: a "),
    (lambda: si.observe(X, pattern="causal"), r"pattern: a pattern, as si.CAUSAL or si.Pattern.of_mask\(matrix\), is"),
    (lambda: si.observe(X, pattern=si.Pattern(prompts=(1, 2))), r"pattern: prompts of 1 \+ 2 tokens for 2 tokens"),
    (
        lambda: si.observe(PROMPTS, pattern=si.Pattern.of_mask([[1, 0], [1, 1]])),
        "pattern: several prompts support si.CA",
    ),
    (lambda: si.Pattern(prompts=3), r"prompts: their numbers of tokens, as \(3, 5\), are needed, got 3"),
    (
        lambda: si.validate(xr.concat([si.observe(X), si.observe(X)], "prompt")),
        "covariance: needs dimensions network",
    ),
    (lambda: si.validate(X), "data: a Dataset of covariances is needed, got ndarray; sdeinfer.observe"),
    (
        lambda: si.covariance_dataset(np.ma.masked_less(X @ X.swapaxes(-1, -2), 0), width=8),
        "covariance: .* entries are masked",
    ),
    (
        lambda: si.observe_outputs(
            np.ma.masked_equal(np.arange(24.0).reshape(3, 2, 4), 5), np.eye(2), width=8, depth=3
        ),
        "outputs: 1 entries are masked",
    ),
]
COVARIANCES = [
    (lambda: cov((1, 2, 0, 1), lambda V: V[1, 2, 0, 1] + 0.1), r"covariance: network 1, layer 2: not symmetric"),
    (lambda: cov((2, 3), np.array([[1.0, 2.0], [2.0, 1.0]])), "covariance: network 2, layer 3: not positive semi-defi"),
    (lambda: cov((0, 1, 1, 1), np.nan), "covariance: network 0, layer 1: 1 entries are NaN or infinite"),
    (lambda: cov((1, 2), 0.0), "covariance: network 1, layer 2: the covariance is zero"),
    (lambda: cov((1, 2), lambda V: V[1, 1]), "covariance: network 1, layer 1: the covariance of the next layer is the"),
    (lambda: cov(1, lambda V: V[1, 0]), "covariance: network 1, layer 0: the covariance is the same after every layer"),
    (lambda: cov().isel(token_a=[0]), "covariance: token_a and token_b must have one length, got 1 and 2"),
    (lambda: cov().isel(network=[]), "covariance: no network in the data"),
    (lambda: cov().rename(covariance="V"), "data: no variable `covariance`"),
    (lambda: cov().astype(int), "covariance: real floating-point numbers are needed"),
    (lambda: cov().drop_vars("layer"), "layer: a coordinate"),
    (lambda: cov().assign_coords(layer=[0, 1, 1, 2]), "layer: layer numbers must start at 0 or later and increase"),
    (lambda: cov().assign_coords(layer=np.arange(4).astype("timedelta64[s]")), "layer: layer numbers must be whole"),
    (lambda: cov().drop_vars("width"), "width: a coordinate on network"),
    (lambda: cov().assign_coords(width=8 + 1j), "width: every width must be at least 1"),
    (lambda: cov().assign_coords(width=1), "width: must be at least the number of tokens, 2, got 1"),
    (lambda: cov().assign_attrs(truth_note="hello"), "truth_note: a number is needed, got 'hello'"),
]
BRANCHES = [
    (lambda: 3, "data: a Dataset of residual branches is needed, got int"),
    (lambda: branches().drop_vars("cross"), "data: no variable `cross`, only"),
    (lambda: branches().isel(token_a=0), "input: needs dimensions network, branch, token_a, token_b, got"),
    (lambda: branches().assign(mean=branches()["mean"].astype(int)), "mean: real floating-point numbers are needed"),
    (lambda: branches().isel(network=[]), "data: no network in it"),
    (lambda: branches().drop_vars("kind"), "kind: a coordinate on branch is needed"),
    (lambda: branches().assign_attrs(reads="x"), "reads: one of branch, stream is needed, got 'x'"),
    (lambda: branches().assign_attrs(prompts="1,1"), r"pattern: prompts of 1 \+ 1 tokens for 3 tokens"),
    (lambda: with_entry("input", np.nan, network=1, branch=2, token_a=0), r"input: network 1, branch 2 \(attention.2"),
    (
        lambda: with_entry("increment", 0.5, network=0, branch=1, token_a=0, token_b=1),
        r"increment: network 0, branch 1 \(mlp.1\): not symmetric",
    ),
    (lambda: with_entry("mean", 9.0, network=1, branch=0), r"mean: network 1, .* not positive semi-definite"),
    (lambda: with_entry("cross", 9.0, network=1, branch=3), r"cross: network 1, branch 3 .* not positive semi-def"),
    (lambda: with_entry("between", 9.0, network=1, branch=1, other_branch=2), r"between: network 1, branch 1 \(mlp.1"),
    (lambda: with_entry("between", np.nan, network=1, branch=1, other_branch=1), r"between: network 1, branch 1 \(mlp"),
    (lambda: with_entry("kurtosis", -1.0, network=0, branch=3), r"kurtosis: network 0, branch 3 .* positive"),
    (
        lambda: branches().isel(token_a=[0, 0, 2], token_b=[0, 0, 2]),
        r"increment: network 0, branch 0 .*: tokens 0, 1",
    ),
    (lambda: branches().isel(network=[0, 0]), "increment: networks 0 and 0: the same increments"),
]
FIRST, LAST = r"network 5, branch 0 \(attention.0\)", r"network 5, branch 3 \(mlp.3\)"
ARRAYS = [
    (changed(U[0], (1, 0, 0), np.nan), D[0], r"input: .*branch 1 \(mlp.1\): 1 entries are NaN or infinite"),
    (U[0], changed(D[0], (2, 1), np.inf), "increment: .*branch 2 .*: 8 entries are NaN or infinite"),
    (U[0], changed(D[0], (0, 1), 0), f"increment: {FIRST}: token 1 gets no increment, which has no density"),
    (
        U[0],
        changed(D[0], (3, 2), D[0, 3, 0] + D[0, 3, 1]),
        f"increment: {LAST}: tokens 0, 1, 2 get linearly dependent increments",
    ),
    (U[0, :, 0], D[0], rf"input: {FIRST}: shape \(tokens, width\) or \(prompts, tokens, width\) is needed, got \(8,\)"),
    (U[0], D[0, ..., :4], rf"increment: {FIRST}: has shape \(3, 4\), where the first has \(3, 8\)"),
    (U[0, ..., :2], D[0, ..., :2], f"input: {FIRST}: 2 features for 3 tokens make the covariance singular, and no"),
    (
        U[0],
        D[0].astype(np.float16),
        f"increment: {FIRST}: float16 rounds the sums inside the branch: run the network in",
    ),
]
SUMS = {name: branches()[name].values for name in branches().data_vars}
OTHERS = [
    (lambda: si.BranchObserver(0), "width: a whole number of at least 1 is needed, got 0"),
    (lambda: si.BranchObserver(reads="both"), "reads: one of branch, stream is needed, got 'both'"),
    (lambda: si.BranchObserver().dataset(), "branches: no branch was given"),
    (lambda: network(width=9), r"width: input: network 0, .* has 8 features, got width 9"),
    (lambda: joined_branches([]), "branches: no network was given"),
    (lambda: joined_branches([network(), network(U[0, :, :2], D[0, :, :2])]), "branches: network 1 has tokens 2, "),
    (lambda: si.observe_branches(OF_TWO, ["a", "b", "c"]), "kinds: 3 kinds do not divide the 4 branches of the hidden"),
    (lambda: si.observe_branches(OF_TWO, ()), r"kinds: a list of at least one kind is needed, got \(\)"),
    *(
        (lambda wrong=wrong: branches_dataset(**(SUMS | {"width": 8, "kinds": KINDS} | wrong)), message)
        for wrong, message in (
            ({"input": SUMS["mean"]}, r"input: dimensions network, branch, token_a, token_b are needed, got shape"),
            ({"kurtosis": np.ones((2, 3))}, r"kurtosis: shape \(2, 4\) is needed beside `mean`, got \(2, 3\)"),
            ({"kinds": ["mlp"]}, r"kinds: one for each of 4 branches is needed, got \['mlp'\]"),
            ({"pattern": si.Pattern(prompts=(2, 2))}, r"pattern: prompts of 2 \+ 2 tokens for 3 tokens"),
        )
    ),
]
CALLS = [
    *((lambda make=make: si.observe(make()), f"hidden_states: (.*)?{message}") for make, message in HIDDEN_STATES),
    *OBSERVED,
    *((lambda make=make: si.validate(make()), message) for make, message in COVARIANCES),
    *((lambda make=make: validate_branches(make()), message) for make, message in BRANCHES),
    *((lambda u=u, d=d: network(u, d, network=5), message) for u, d, message in ARRAYS),
    *OTHERS,
]


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:50] for _, message in CALLS])
def test_what_is_wrong_is_said_in_one_line(call, message, unchecked):
    with pytest.raises(si.InputError, match=f"^{message}") as refusal:
        call()
    assert "\n" not in str(refusal.value)
