"""`sdeinfer.modules` of each library, with one interface for the tests of both."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flax import nnx

from sdeinfer.modules import flax as modules


class Torch:
    """The modules of PyTorch, in float64 unless told otherwise; masks and tokens are NumPy's."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.modules = importlib.import_module("sdeinfer.modules.torch")

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

    def gradients(self, module, X, *mask) -> dict[str, np.ndarray]:
        """The gradients of the sum of sin X′, by path."""
        module(X, *mask).sin().sum().backward()
        return {name.removesuffix(".weight"): self.numpy(p.grad).T for name, p in module.named_parameters()}

    def call(self, module, X, *mask):
        return module(X, *mask)

    def otherwise(self, module, X):
        """The output of `call`, compiled."""
        return self.torch.compile(module, fullgraph=True)(X)

    def widened(self, module):
        """The module with its weights in float64."""
        return module.double()

    def covariances(self, make: Callable, X: np.ndarray, *, depth: int) -> np.ndarray:
        self.torch.manual_seed(1)
        V = []
        with self.torch.no_grad():
            for one in self.array(X):
                for _ in range(depth):
                    one = make(dtype=self.torch.float64)(one)
                    V.append(self.numpy(one @ one.mT / one.shape[-1]))
        return np.reshape(V, (len(X), depth, *V[0].shape))


class Flax:
    """Those of Flax nnx."""

    def __init__(self):
        self.modules = modules
        self._call = nnx.jit(lambda module, X, *mask: module(X, *mask))

    def dtype(self, name: str):
        return jnp.dtype(name)

    def options(self, dtype: str = "float64") -> dict[str, Any]:
        return {"param_dtype": self.dtype(dtype), "rngs": nnx.Rngs(0)}

    def array(self, values: np.ndarray, dtype: str = "float64"):
        values = jnp.asarray(values)
        return values if values.dtype == bool else values.astype(dtype)

    def numpy(self, values) -> np.ndarray:
        return np.asarray(values.astype(jnp.promote_types(values.dtype, "float32")))

    def _by_path(self, state) -> dict[str, np.ndarray]:
        flat = nnx.to_flat_state(state)
        return {".".join(path).removesuffix(".kernel"): self.numpy(value[...]) for path, value in flat}

    def parameters(self, module) -> dict[str, np.ndarray]:
        return self._by_path(nnx.state(module, nnx.Param))

    def gradients(self, module, X, *mask) -> dict[str, np.ndarray]:
        gradient = nnx.grad(lambda module, X, *mask: jnp.sin(module(X, *mask)).sum())
        return self._by_path(nnx.jit(gradient)(module, X, *mask))

    def call(self, module, X, *mask):
        return self._call(module, X, *mask)

    def otherwise(self, module, X):
        """Half of it by JAX's own jit, half without: `call` is compiled by nnx."""
        graph, state = nnx.split(module)
        return (jax.jit(lambda state, X: nnx.merge(graph, state)(X))(state, X) + module(X)) / 2

    def widened(self, module):
        graph, state = nnx.split(module)
        return nnx.merge(graph, jax.tree.map(lambda value: value.astype("float64"), state))

    def covariances(self, make: Callable, X: np.ndarray, *, depth: int) -> np.ndarray:
        def one_layer(key, X):
            X = make(param_dtype=float, rngs=nnx.Rngs(key))(X)
            return X, X @ X.mT / X.shape[-1]

        of_all, V, states = jax.jit(jax.vmap(one_layer)), [], jnp.asarray(X)
        for key in jr.split(jr.key(1), (depth, len(X))):
            states, covariance = of_all(key, states)
            V.append(covariance)
        return np.stack(V, axis=1)
