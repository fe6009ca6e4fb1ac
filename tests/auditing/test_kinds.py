"""Kinds of mistakes in a function of JAX: each is found and named, and the function without it passes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdeinfer as si

N, LAYERS, HEADS, TOKENS = 48, 4, 3, 8
X = np.random.default_rng(5).standard_normal((2, TOKENS, N)).astype(np.float32)
XAVIER = (2 / (2 * N)) ** 0.5


def weights(seed=0, *, sd=0.05, packed=False, **extra):
    rng = np.random.default_rng(seed)
    first = {"qkv": (N, 3 * N)} if packed else {"q": (N, N), "k": (N, N), "v": (N, N)}
    shapes = first | {"o": (N, N), "up": (N, 2 * N), "down": (2 * N, N)}

    def layer():
        own = {name: jnp.asarray(sd * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
        return own | {"norm1": jnp.ones(N), "norm2": jnp.ones(N)} | extra

    return {"layers": [layer() for _ in range(LAYERS)]}


def normed(x, gain, bug):
    axis, epsilon = (-2 if bug == "axis" else -1), (1.0 if bug == "epsilon" else 1e-6)
    x = x - x.mean(-1, keepdims=True) if bug == "centred" else x
    square = jnp.square(x).mean(axis, keepdims=True) + epsilon
    y = x / (square if bug == "mean square" else jnp.sqrt(square)) * gain
    return {"factor": 2.0, "zero": 0.0}.get(bug, 1.0) * y


def attention(own, x, bug, first):
    if "qkv" in own:
        q, k, v = jnp.split(x @ own["qkv"], 3, -1)
        v = k if bug == "k for v" else v
    else:
        q, k, v = (x @ own[name] for name in "qkv")
        v = normed(first, own["norm1"], "") @ own["v"] if bug == "values" else v
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
    if bug == "norm over tokens":
        q, k = (y / jnp.sqrt(jnp.square(y).mean(1, keepdims=True)) for y in (q, k))
    scale = {"√n": N**-0.5, "√heads": HEADS**-0.5}.get(bug, (N // HEADS) ** -0.5)
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if "mask" in own:
        logits = logits + own["mask"]
    A = jax.nn.softmax(logits, {"queries": -2, "heads": 1}.get(bug, -1))
    return jnp.einsum("bhqk,bkhd->bqhd", A, v).reshape(x.shape) @ own["o"]


def network(parameters, x, *, bug="", bugs_in=range(LAYERS)):
    first = before = x
    for number, own in enumerate(parameters["layers"]):
        here = bug if number in bugs_in else ""
        u = x if here == "norm1" else normed(before if here == "earlier" else x, own["norm1"], here)
        branch = attention(own, u, here, first)
        if "gate" in own:
            jax.nn.sigmoid(u @ own["gate"])
        y = branch if here == "no sum" else x - branch if here == "subtracted" else x + branch
        u = normed(x if here == "parallel" else y, own["norm2"], here)
        u = u + 0.5 * u[::-1] if here == "items" else u
        second = jax.nn.gelu(u @ own["up"]) @ own["down"]
        before, start = x, x if here == "second sum" else second if here == "itself" else y
        x = start + second
        x = x + {"twice": second, "again": before}[here] if here in ("twice", "again") else x
    return x


def audited(bug="", *, bugs_in=range(LAYERS), parameters=None, inputs=X, packed=False, **arguments):
    def model(parameters, x):
        return network(parameters, x, bug=bug, bugs_in=bugs_in)

    return si.audit((model, weights(packed=packed) if parameters is None else parameters), inputs, **arguments)


NORMAL = si.audit.recipes.normal(0.05)
KINDS = {
    "queries": ({}, "softmax runs over queries, not over keys"),
    "no sum": ({"bugs_in": [1]}, "layers.1.o returns is not added to the stream, as it is in other layers"),
    "second sum": ({}, "is added to the input of the sum before it, not to it"),
    "subtracted": ({"bugs_in": [2]}, "the attention of layer 2 is subtracted"),
    "itself": ({}, "a tensor is added to itself"),
    "axis": ({}, "is not over the features of a token"),
    "epsilon": ({"recipe": NORMAL}, "times a unit norm, declared 1"),
    "factor": ({"recipe": NORMAL}, "reads is 2 times a unit norm, declared 1"),
    "zero": ({}, "reads is multiplied by 0"),
    "norm1": ({"norm": "pre"}, "read the stream without a norm (attention, layer 0)"),
    "√n": ({"recipe": NORMAL}, "1/√n is taken for 1/√d_k"),
    "√heads": ({"recipe": NORMAL}, "1/√heads is taken for 1/√d_k"),
    "heads": ({}, "softmax runs over another axis, not over keys"),
    "values": ({}, "values are of another tensor than keys (layer 1, 3 in all)"),
    "k for v": ({"packed": True}, "48 of 144 outputs of layers.0.qkv are not used"),
    "norm over tokens": ({}, "norms of queries or keys are not over the features of a head"),
    "mean square": ({}, "a norm divides by the mean square, not by its root"),
    "items": ({}, "an item of the batch changes another one"),
    "twice": ({"bugs_in": [1]}, "what a branch returns is added twice (layer 1)"),
    "again": ({}, "the stream is added to a sum that has it already, and counts twice (layer 0)"),
    "earlier": (
        {"bugs_in": [2]},
        "attention of layer 2 reads another state of the stream, unlike that of other layers",
    ),
}


@pytest.mark.parametrize("bug", KINDS)
def test_a_kind_is_named(bug):
    arguments, says = KINDS[bug]
    found = audited(bug, **arguments)
    assert found.passed is False
    assert says in found.verdict, found.verdict


def test_the_same_without_a_mistake():
    assert audited().passed is None
    assert audited(recipe=NORMAL, norm="pre", causal=False).passed, "all that is declared was tested"


@pytest.mark.parametrize("style", ["centred", "parallel"])
def test_norms_by_hand_and_parallel_branches_pass(style):
    assert audited(style, recipe=NORMAL, norm="pre", causal=False).passed, style


def test_what_is_computed_and_not_used_is_named():
    found = audited(parameters=weights(gate=jnp.asarray(0.05 * np.random.default_rng(2).standard_normal((N, N)))))
    assert "no output follows from layers.0.gate" in found.verdict


def test_a_mask_that_leaks_near_its_ends_is_found():
    """Blocks of four tokens that see each other; a prefix of three that all see."""
    query, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)
    for sees in (key // 4 <= query // 4, (key <= query) | (key < 3)):
        found = audited(parameters=weights(mask=jnp.where(sees, 0.0, -jnp.inf)), causal=True)
        assert "the causal mask is not there" in found.verdict


def of_stacks(parameters, x):
    def layer(x, own):
        return network({"layers": [own]}, x), None

    return jax.lax.scan(layer, x.astype(parameters["stacks"]["norm1"].dtype), parameters["stacks"])[0]


def by_index(parameters, x):
    layers = [jax.tree.map(lambda stack: stack[number], parameters["stacks"]) for number in range(LAYERS)]  # noqa: B023
    return network({"layers": layers}, x)


def stacks(seed=0):
    return {"stacks": jax.tree.map(lambda *layers: jnp.stack(layers), *weights(seed)["layers"])}


@pytest.mark.one_case
@pytest.mark.parametrize("model", [of_stacks, by_index])
def test_layers_of_a_stack_are_layers(model):
    """In a scan and by index: rules by layer, initialisation and another draw."""
    parameters = stacks()
    scale = (1 + jnp.arange(LAYERS, dtype=jnp.float32)) ** -0.5
    parameters["stacks"]["down"] *= scale[:, None, None]
    rule = {"mlp output": lambda matrix: 0.05 / (matrix.layer + 1) ** 0.5}
    assert si.audit((model, parameters), X, recipe=rule).passed
    assert si.audit((model, stacks()), X, recipe=rule).passed is False
    drawn = si.audit.initialise((model, stacks()), "xavier", X)
    assert drawn.audit.passed, drawn
    assert drawn.model[1]["stacks"]["q"].std() == pytest.approx(XAVIER, rel=0.05)
    assert si.audit((model, stacks()), X, like=(model, stacks(1))).passed


def transformer_of_einsums(parameters, x, *, keys_of=lambda u, x: u, dtype=jnp.float32):
    """Keys and values that all heads share, which JAX multiplies queries by from the left; and experts in one array."""
    x = x.astype(dtype)
    for own in parameters:
        u = normed(x, 1.0, "").astype(dtype)
        q, k, v = jnp.einsum("btn,nhd->bthd", u, own["q"]), keys_of(u, x) @ own["k"], u @ own["v"]
        A = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
        x = x + jnp.einsum("bhqk,bkd,hdn->bqn", A, v, own["o"])
        u = normed(x, 1.0, "").astype(dtype)
        weights = jax.nn.softmax(u @ own["router"], -1)
        hidden = jax.nn.gelu(jnp.einsum("btn,enf->btef", u, own["up"]))
        x = x + jnp.einsum("bte,btef,efn->btn", weights, hidden, own["down"])
    return x


def einsum_weights(dtype=jnp.float32):
    rng, d, experts = np.random.default_rng(0), N // HEADS, 3
    shapes = {"q": (N, HEADS, d), "k": (N, d), "v": (N, d), "o": (HEADS, d, N), "router": (N, experts)}
    shapes |= {"up": (experts, N, 2 * N), "down": (experts, 2 * N, N)}
    fans = {"o": N, "down": 2 * N}

    def drawn(name, shape):
        return jnp.asarray(rng.standard_normal(shape) * fans.get(name, N) ** -0.5, dtype)

    return [{name: drawn(name, shape) for name, shape in shapes.items()} for _ in range(2)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_einsums_have_the_fans_and_roles_of_their_matrices(dtype):
    found = si.audit((partial(transformer_of_einsums, dtype=dtype), einsum_weights(dtype)), X, recipe="lecun")
    assert found.passed, found.verdict
    frame = found.to_frame()
    assert [frame.loc[name, "role"] for name in ("0.q", "0.k", "0.v")] == ["query", "key", "value"]
    assert frame.loc["0.up", "fan_out"] == frame.loc["0.down", "fan_in"] == 2 * N
    wrong = partial(transformer_of_einsums, keys_of=lambda u, x: x)
    assert "key read the stream itself, where query reads its norm" in si.audit((wrong, einsum_weights()), X).verdict


def test_one_layer_unlike_the_others():
    assert "unlike that of other layers" in audited("norm1", bugs_in=[2]).verdict
    assert "reads is 2 times that of other layers" in audited("factor", bugs_in=[2]).verdict


def test_a_parameter_without_use_is_a_mistake_inside_of_layers():
    found = audited(parameters=weights(q_norm=jnp.ones(N // HEADS)))
    assert "no output follows from layers.0.q_norm" in found.verdict
    assert audited(parameters=weights(q_norm=jnp.ones(N // HEADS)), allow=["unused"]).passed is None
    outside = audited(parameters=weights() | {"left": jnp.ones(3)})
    assert outside.passed is None
    assert "no output follows from left" in outside.verdict


def test_a_mask_of_infinities_is_legal_where_it_is_added_to_logits():
    mask = jnp.triu(jnp.full((TOKENS, TOKENS), -jnp.inf), 1)
    assert audited(parameters=weights(mask=mask), recipe=NORMAL, causal=True).passed
    spoiled = audited(parameters=weights(mask=mask.at[0, 1].set(jnp.nan)), recipe=NORMAL)
    assert "NaN or infinity in layers.0.mask" in spoiled.verdict


def test_what_is_declared_and_not_tested_is_said_first():
    def model(parameters, image, tokens=None):
        y = image @ parameters["image"]
        return y if tokens is None else y + network(parameters, tokens)

    image = jnp.asarray(0.05 * np.random.default_rng(1).standard_normal((N, N)), jnp.float32)
    found = si.audit((model, weights() | {"image": image}), {"image": X}, recipe=NORMAL)
    assert found.passed is None
    assert found.verdict.startswith("not tested: 24 of 25 matrices are not reached by these inputs")
    with pytest.raises(AssertionError, match="24 of 25 matrices"):
        si.audit.assert_initialised((model, weights() | {"image": image}), {"image": X}, recipe=NORMAL)
    both = {"image": X, "tokens": X}
    assert si.audit((model, weights() | {"image": image}), both, recipe=NORMAL).passed


def test_a_mask_of_one_token_is_not_tested_unless_that_is_allowed():
    one = {"inputs": X[:, :1], "recipe": NORMAL, "causal": False}
    assert audited(**one).untested == ("causal=False: these inputs have no tokens that could be changed",)
    assert audited(**one, allow=["causal"]).passed
    assert audited(**one, allow=["untested"]).passed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"norm": "Pre"}, "norm: one of pre, post, sandwich, qk is needed"),
        ({"allow": "copies"}, "allow: a list is needed"),
    ],
)
def test_words_are_validated(arguments, line):
    with pytest.raises(si.InputError, match=line):
        audited(**arguments)


def test_three_matrices_in_one_array_are_three():
    """Xavier's fan_out of queries is n and not 3n; what is drawn by a recipe passes its own audit."""
    apart = audited(parameters=weights(sd=XAVIER, packed=True))
    assert {"query", "key", "value"} <= {row.matrix.role for row in apart.rows}
    sizes = [(row.matrix.fan_in, row.matrix.fan_out) for row in apart.rows if row.matrix.role == "key"]
    assert sizes == LAYERS * [(N, N)]
    parameters = weights(sd=XAVIER, packed=True)
    one = {"query": XAVIER, "key": XAVIER, "value": XAVIER}
    assert audited(parameters=parameters, recipe=one).passed
    for layer in parameters["layers"]:
        layer["qkv"] = layer["qkv"].at[:, N : 2 * N].multiply(0.5**0.5)
    found = audited(parameters=parameters, recipe="xavier")
    assert "the key matrices have the fan_out of all matrices in one array" in found.verdict
    assert "σ of query" not in found.verdict


@pytest.mark.parametrize("recipe", ["xavier", "gpt2", "pytorch_linear", {"*": (0.03, "truncated")}])
def test_a_model_that_is_initialised_passes_its_own_audit(recipe):
    def model(parameters, x):
        return network(parameters, x)

    found = si.audit.initialise((model, weights(packed=True)), recipe, X)
    assert found.audit.passed, found


def test_an_embedding_is_drawn_if_a_rule_has_its_role():
    def model(parameters, tokens):
        return network(parameters, parameters["table"][tokens])

    rng = np.random.default_rng(3)
    parameters = weights() | {"table": jnp.asarray(rng.normal(size=(99, N)), jnp.float32)}
    tokens = jnp.asarray(rng.integers(99, size=(2, 8)))
    by_role = {"embedding": 0.05} | dict.fromkeys(("query", "key", "value", "attention output"), 0.04)
    found = si.audit.initialise((model, parameters), by_role | {"*": 0.03}, tokens)
    assert found.audit.passed, found
    assert found.model[1]["table"].std() == pytest.approx(0.05, rel=0.1)
    left_alone = si.audit.initialise((model, parameters), "xavier", tokens).model[1]["table"]
    np.testing.assert_array_equal(left_alone, parameters["table"])


def test_another_model_is_compared_by_role_and_by_values():
    def model(parameters, x):
        return network(parameters, x)

    def other(parameters, x):
        return network({"layers": parameters["blocks"]}, x)

    def reversed_heads(parameters, x):
        own = [layer | {"v": layer["v"][:, ::-1]} for layer in parameters["blocks"]]
        return network({"layers": own}, x)

    blocks = {"blocks": weights(seed=1)["layers"]}
    assert si.audit((model, weights()), X, like=(other, blocks)).passed
    found = si.audit((model, weights()), X, like=(reversed_heads, blocks))
    assert "with the same weights reversed_heads returns other values" in found.verdict
    packed = si.audit((model, weights(packed=True)), X, like=(other, blocks))
    assert packed.verdict.startswith("not tested: outputs with the same weights")


def test_entries_far_away_are_named():
    parameters = weights()
    parameters["layers"][1]["up"] = parameters["layers"][1]["up"].at[3, 5].set(-2.0)
    found = audited(parameters=parameters, recipe=NORMAL)
    assert "entries of layers.1.up are up to 39.9 σ away" in found.verdict
    assert "σ of" not in found.verdict.split("[")[0]


def test_zeros_are_dead_where_no_gradient_passes():
    def zeroed(*names):
        parameters = weights()
        for layer in parameters["layers"]:
            layer |= {name: jnp.zeros_like(layer[name]) for name in names}
        return audited(parameters=parameters)

    # One matrix of zeros alone is what muP's queries and LoRA start from.
    for name in ("q", "o", "up", "down"):
        assert zeroed(name).passed is None, name
    assert "layers.0.q and layers.0.k are both 0" in zeroed("q", "k").verdict
    assert "layers.0.up and layers.0.down are both 0" in zeroed("up", "down").verdict
