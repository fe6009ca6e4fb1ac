"""The product of many small matrices, as a JAX primitive with derivatives that are products too.

XLA compiles the unrolled sum A₀B₀ + A₁B₁ + … to fast code. Its automatic derivative backwards, however, is a sum of
padded slices of every term: a gradient of `simulate` takes two to six times as long, and twice the compilation. The
primitive is bilinear, so that its derivatives are dA B + A dB forwards, and G Bᵀ and AᵀG backwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float


def product(A: Float[Array, "m k *#batch"], B: Float[Array, "k l *#batch"]) -> Float[Array, "m l ..."]:
    """A B for each trailing index, as an unrolled sum over k."""
    batch, dtype = jnp.broadcast_shapes(A.shape[2:], B.shape[2:]), jnp.result_type(A, B)
    aligned = (jnp.expand_dims(x, tuple(range(2, len(batch) + 4 - x.ndim))) for x in (A, B))
    return _product.bind(*(jnp.broadcast_to(x, (*x.shape[:2], *batch)).astype(dtype) for x in aligned))


def _unrolled(A: Array, B: Array) -> Array:
    A, B = jax.lax.optimization_barrier((A, B))
    total = A[:, 0, None] * B[None, 0]
    for k in range(1, A.shape[1]):
        total = total + A[:, k, None] * B[None, k]
    # Without the barrier XLA fuses the product into each of its uses and recomputes it for every entry.
    return jax.lax.optimization_barrier(total)


def _shape(A: ShapedArray, B: ShapedArray) -> ShapedArray:
    return ShapedArray((A.shape[0], B.shape[1], *A.shape[2:]), A.dtype)


def _mapped(
    args: tuple[Array | np.ndarray, Array | np.ndarray], axes: tuple[int | None, int | None]
) -> tuple[Array, int]:
    """`jax.vmap`: the mapped axis becomes the last one."""
    (size,) = {x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None}
    A, B = (
        jnp.broadcast_to(x[..., None], (*x.shape, size)) if axis is None else jnp.moveaxis(x, axis, -1)
        for x, axis in zip(args, axes, strict=True)
    )
    return _product.bind(A, B), A.ndim - 1


_product = Primitive("sdeinfer_product")
_product.def_impl(jax.jit(_unrolled))
_product.def_abstract_eval(_shape)
mlir.register_lowering(_product, mlir.lower_fun(_unrolled, multiple_results=False))
ad.defbilinear(
    _product,
    lambda G, A, B: _product.bind(G, B.swapaxes(0, 1)),
    lambda G, A, B: _product.bind(A.swapaxes(0, 1), G),
)
batching.primitive_batchers[_product] = _mapped
