"""Outputs of `sdeinfer.modules` in one library, as arrays for `modules/test_modules.py`; nothing here asserts.

    python module_runs.py torch OUT.npz

The interpreter needs the library and this package.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import sdeinfer as si

WIDTH, TOKENS, BATCH = 16, 5, 2
GAMMA, TAU0, C_PLUS, C_MINUS = 0.6, 0.3, 0.7, -1.4
ATTENTION: dict[str, Any] = {"gamma": GAMMA, "tau0": TAU0}
FEEDFORWARD: dict[str, Any] = {"gamma": GAMMA, "c_plus": C_PLUS, "c_minus": C_MINUS}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("ShapedAttention", ATTENTION),
    "causal attention": ("ShapedAttention", ATTENTION | {"causal": True}),
    "heads": ("ShapedAttention", ATTENTION | {"heads": 4, "key_width": 3, "causal": True}),
    "projection": ("ShapedAttention", ATTENTION | {"heads": 2, "output_projection": True}),
    "gains": ("ShapedAttention", ATTENTION | {"gamma1": 0.8, "gamma2": 1.1, "trainable_gains": True, "causal": True}),
    "constant gains": ("ShapedAttention", ATTENTION | {"gamma1": 0.8, "gamma2": 1.1}),
    "feedforward": ("ShapedFeedForward", FEEDFORWARD),
    "expansion": ("ShapedFeedForward", FEEDFORWARD | {"expansion": 2}),
    "transformer": ("ShapedTransformer", ATTENTION | FEEDFORWARD),
    "sizes": (
        "ShapedTransformer",
        ATTENTION | FEEDFORWARD | {"heads": 2, "output_projection": True, "causal": True, "expansion": 2},
    ),
}

COMPILED = ("heads", "gains", "expansion", "sizes")

DEPTH, LAW_WIDTH, NETWORKS = 8, 32, 400
V0 = np.array([[1.3, 0.4, -0.2], [0.4, 0.9, 0.1], [-0.2, 0.1, 1.1]])
LAWS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 2, "key_width": 4},
    "all sizes": {"heads": 4, "output_projection": True, "causal": True, "expansion": 2},
}
LAW_OF = {"gamma": 0.5, "tau0": 0.6, "c_plus": 1.0, "c_minus": -2.0}

HALF_WIDTH, HALF_DEPTH, HALF_GAMMA = 128, 32, 0.06
"""λ = √(1 − γ²) is 1 in bfloat16."""

KEPT = 3
"""Tokens that are not padding."""


def tokens(*shape: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    """Tokens large enough for a softmax that is far from flat."""
    return scale * np.random.default_rng(seed).standard_normal(shape)


def tokens_of(V: np.ndarray, networks: int, width: int) -> np.ndarray:
    """For each network, tokens in random directions with X Xᵀ/n = V."""
    G = np.random.default_rng(3).standard_normal((networks, width, len(V)))
    return math.sqrt(width) * np.linalg.cholesky(V) @ np.linalg.qr(G)[0].swapaxes(1, 2)


class Torch:
    """The modules of PyTorch, in float64 unless told otherwise; masks and tokens are NumPy's."""

    def __init__(self):
        import torch  # pyright: ignore[reportMissingImports]

        from sdeinfer.modules import torch as modules

        torch.set_num_threads(1)
        self.torch, self.modules = torch, modules

    def dtype(self, name: str):
        return getattr(self.torch, name)

    def options(self, dtype: str = "float64") -> dict[str, Any]:
        self.torch.manual_seed(0)
        return {"dtype": self.dtype(dtype)}

    def array(self, values: np.ndarray, dtype: str = "float64"):
        tensor = self.torch.from_numpy(np.array(values))
        return tensor if tensor.dtype == self.torch.bool else tensor.to(self.dtype(dtype))

    def numpy(self, values) -> np.ndarray:
        return values.detach().to(self.torch.promote_types(values.dtype, self.torch.float32)).numpy()

    def parameters(self, module) -> dict[str, np.ndarray]:
        """The parameters by path; matrices are (fan_in, fan_out)."""
        return {name.removesuffix(".weight"): self.numpy(p).T for name, p in module.named_parameters()}

    def gradients(self, module, X, mask=None) -> dict[str, np.ndarray]:
        """The gradients of the sum of sin X′, by path."""
        module(X, *([] if mask is None else [mask])).sin().sum().backward()
        return {name.removesuffix(".weight"): self.numpy(p.grad).T for name, p in module.named_parameters()}

    def call(self, module, X, *mask):
        return module(X, *mask)

    def otherwise(self, module, X):
        """The output of `call`, compiled."""
        return self.torch.compile(module, fullgraph=True)(X)

    def widened(self, module):
        """The module with its weights in float64."""
        return module.double()

    def covariances(self, make: Callable, X: np.ndarray) -> np.ndarray:
        self.torch.manual_seed(1)
        V = []
        with self.torch.no_grad():
            for one in self.array(X):
                for _ in range(DEPTH):
                    one = make(dtype=self.torch.float64)(one)
                    V.append(self.numpy(one @ one.mT / one.shape[-1]))
        return np.reshape(V, (len(X), DEPTH, *V[0].shape))


class Flax:
    """Those of Flax nnx."""

    def __init__(self):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from sdeinfer.modules import flax as modules

        self.jax, self.jnp, self.nnx, self.modules = jax, jnp, nnx, modules
        self._call = nnx.jit(lambda module, X, *mask: module(X, *mask))

    def dtype(self, name: str):
        return self.jnp.dtype(name)

    def options(self, dtype: str = "float64") -> dict[str, Any]:
        return {"param_dtype": self.dtype(dtype), "rngs": self.nnx.Rngs(0)}

    def array(self, values: np.ndarray, dtype: str = "float64"):
        values = self.jnp.asarray(values)
        return values if values.dtype == bool else values.astype(dtype)

    def numpy(self, values) -> np.ndarray:
        return np.asarray(values.astype(self.jnp.promote_types(values.dtype, "float32")))

    def _by_path(self, state) -> dict[str, np.ndarray]:
        flat = self.nnx.to_flat_state(state)
        return {".".join(path).removesuffix(".kernel"): self.numpy(value[...]) for path, value in flat}

    def parameters(self, module) -> dict[str, np.ndarray]:
        return self._by_path(self.nnx.state(module, self.nnx.Param))

    def gradients(self, module, X, mask=None) -> dict[str, np.ndarray]:
        given = [] if mask is None else [mask]
        gradient = self.nnx.grad(lambda module, X, *mask: self.jnp.sin(module(X, *mask)).sum())
        return self._by_path(self.nnx.jit(gradient)(module, X, *given))

    def call(self, module, X, *mask):
        return self._call(module, X, *mask)

    def otherwise(self, module, X):
        """Half of it by JAX's own jit, half without: `call` is compiled by nnx."""
        graph, state = self.nnx.split(module)
        return (self.jax.jit(lambda state, X: self.nnx.merge(graph, state)(X))(state, X) + module(X)) / 2

    def widened(self, module):
        graph, state = self.nnx.split(module)
        return self.nnx.merge(graph, self.jax.tree.map(lambda value: value.astype("float64"), state))

    def covariances(self, make: Callable, X: np.ndarray) -> np.ndarray:
        def one_layer(key, X):
            X = make(param_dtype=float, rngs=self.nnx.Rngs(key))(X)
            return X, X @ X.mT / X.shape[-1]

        of_all, V, states = self.jax.jit(self.jax.vmap(one_layer)), [], self.jnp.asarray(X)
        for key in self.jax.random.split(self.jax.random.key(1), (DEPTH, len(X))):
            states, covariance = of_all(key, states)
            V.append(covariance)
        return np.stack(V, axis=1)


LIBRARIES = {"torch": Torch, "flax": Flax}


def made(of, case: str):
    """The module of a case, and its tokens."""
    kind, arguments = CASES[case]
    return getattr(of.modules, kind)(WIDTH, **arguments, **of.options())


def outputs(of) -> dict[str, np.ndarray]:
    """Parameters, gradients and X′ of every case."""
    found, X = {}, of.array(tokens(BATCH, TOKENS, WIDTH))
    for case in CASES:
        module = made(of, case)
        found |= {f"{case}/parameter {name}": value for name, value in of.parameters(module).items()}
        found |= {f"{case}/gradient {name}": value for name, value in of.gradients(module, X).items()}
        found[f"{case}/X"] = of.numpy(of.call(module, X))
        if case in COMPILED:
            found[f"{case}/otherwise"] = of.numpy(of.otherwise(module, X))
            found[f"{case}/one"] = of.numpy(of.call(module, X[0]))
    return found


def law(of) -> dict[str, np.ndarray]:
    """V after every block of networks with fresh weights."""
    X, found = tokens_of(V0, NETWORKS, LAW_WIDTH), {}
    for name, sizes in LAWS.items():
        make = functools.partial(of.modules.ShapedTransformer, LAW_WIDTH, **LAW_OF, **sizes)
        found[name] = of.covariances(make, X)
    return found


def half(of) -> dict[str, np.ndarray]:
    """A − I, and X after many blocks, in half precision and in float64 with the same weights and tokens."""
    found, arguments = {}, LAW_OF | {"gamma": HALF_GAMMA, "heads": 4}
    for dtype in ("bfloat16", "float16"):
        X, options = of.array(tokens(TOKENS, HALF_WIDTH, scale=1.0), dtype), of.options(dtype)
        blocks = [of.modules.ShapedTransformer(HALF_WIDTH, **arguments, **options) for _ in range(HALF_DEPTH)]
        trained = of.modules.ShapedAttention(HALF_WIDTH, 0.5, 1.0, trainable_gains=True, **options)
        found |= {f"{dtype}/gradient {name}": value for name, value in of.gradients(trained, X).items()}
        found |= {f"{dtype}/types": np.array([str(x.dtype) for x in (blocks[0](X), X, trained.gamma1)])}
        for name in ("half", "double"):
            found[f"{dtype}/A − I in {name}"] = of.numpy(blocks[0].attention.mixing(X))
            found[f"{dtype}/X in {name}"] = of.numpy(functools.reduce(lambda X, block: of.call(block, X), blocks, X))
            X, blocks = of.array(of.numpy(X)), [of.widened(block) for block in blocks]
    return found


def padding(of) -> dict[str, np.ndarray]:
    """X′ with padded tokens, by a mask of columns, by a mask of both, and without the padding."""
    found = {}
    X, seen = tokens(BATCH, TOKENS, WIDTH), np.arange(TOKENS) < KEPT
    masks = {"columns": np.tile(seen, (BATCH, 1, 1)), "both": seen[:, None] & seen, "row": seen}
    for case in ("attention", "heads", "sizes"):
        module = made(of, case)
        found[f"{case}/kept"] = of.numpy(of.call(module, of.array(X[:, :KEPT])))
        for name, mask in masks.items():
            found[f"{case}/{name}"] = of.numpy(of.call(module, of.array(X), of.array(mask)))
        gradients = of.gradients(module, of.array(X), of.array(masks["both"]))
        found |= {f"{case}/gradient {name}": value for name, value in gradients.items()}
    return found


def handed_over(of) -> dict[str, np.ndarray]:
    """X′ of modules made of layers, the constants they have, and what is said of other layers."""
    found, X = {}, of.array(tokens(BATCH, TOKENS, WIDTH))
    sizes = {"heads": 2, "output_projection": True, "pattern": si.CAUSAL}
    layers = {
        "gains": si.ShapedAttention(**ATTENTION, gamma1=0.8, gamma2=1.1, pattern=si.CAUSAL),
        "expansion": si.ResidualFeedForward(**FEEDFORWARD, expansion=2),
        "transformer": si.ShapedTransformer(**ATTENTION, c_plus=C_PLUS, c_minus=C_MINUS),
        "sizes": si.OverDepth(
            si.ShapedTransformer(0.1, TAU0, C_PLUS, C_MINUS, expansion=2, **sizes), gamma=lambda t: GAMMA + t
        ).at(0.0),
    }
    for case, layer in layers.items():
        module = getattr(of.modules, CASES[case][0]).of(layer, WIDTH, **of.options())
        found[case] = of.numpy(of.call(module, X))
    wrong = {
        "pattern": ("ShapedAttention", si.ShapedAttention(**ATTENTION, pattern=si.Pattern(prompts=(2, 3)))),
        "kind": ("ShapedTransformer", si.ShapedAttention(**ATTENTION)),
        "over depth": ("ShapedAttention", si.OverDepth(si.ShapedAttention(**ATTENTION), gamma=lambda t: 0.5)),
    }
    calls = {name: lambda k=kind, x=layer: getattr(of.modules, k).of(x, WIDTH) for name, (kind, layer) in wrong.items()}
    calls |= {
        "heads": lambda: of.modules.ShapedAttention(WIDTH, 0.5, 1.0, heads=3),
        "gamma": lambda: of.modules.ShapedTransformer(WIDTH, 1.5, 1.0, 1.0, -1.0),
        "tau0": lambda: of.modules.ShapedAttention(WIDTH, 0.5, 0.0),
        "expansion": lambda: of.modules.ShapedFeedForward(WIDTH, 0.5, 1.0, -1.0, expansion=0.3),
    }
    return found | {f"error {name}": np.array(said_by(call)) for name, call in calls.items()}


def said_by(call: Callable) -> str:
    """The message of an InputError."""
    try:
        call()
    except si.InputError as error:
        return str(error)
    return "no error"


SUBJECTS = {"outputs": outputs, "law": law, "half": half, "padding": padding, "handed over": handed_over}


if __name__ == "__main__":
    library = LIBRARIES[sys.argv[1]]()
    found = {f"{name}/{key}": value for name, of in SUBJECTS.items() for key, value in of(library).items()}
    np.savez(sys.argv[2], **found)  # pyright: ignore[reportArgumentType]
