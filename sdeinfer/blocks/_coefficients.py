"""Observed increments reduced to what the posterior of strengths, gains and temperatures needs.

Tests: `tests/blocks/test_law.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, ArrayLike, Float, Int

from sdeinfer._files import InputError
from sdeinfer._threads import in_threads
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._law import LogMatrixNormal, increment_law
from sdeinfer.blocks._norms import normalised_covariance
from sdeinfer.blocks._order import BlockOrder

LARGEST_FACTOR = 32.0
"""Largest factor between a gain or temperature at which the law is computed and the block's own value."""

LOG_FACTORS = -np.log(LARGEST_FACTOR) * np.cos(np.pi * np.arange(33) / 32)
"""Logarithms of the factors, at Chebyshev's points; their number is odd, so that 1 is one of them."""
LOG_FACTORS[16] = 0.0


def read_covariance(data: xr.Dataset, block: Block, branch: int) -> Float[np.ndarray, "networks m m"]:
    """The covariance of what a branch reads: as observed, or of the residual stream after the block's norm."""
    V = data["input"].values[:, branch]
    if data.attrs.get("reads") != "stream" or block.position == "post":
        return V
    mean = data["mean"].values[:, branch]
    covariance = normalised_covariance(jnp.moveaxis(V, 0, -1), block.norm, jnp.moveaxis(mean, 0, -1))
    return np.moveaxis(np.asarray(covariance), -1, 0)


def branch_coefficients(
    data: xr.Dataset,
    order: BlockOrder,
    *,
    log_factors: Float[np.ndarray, " grid"] = LOG_FACTORS,
    log2: int | None = None,
) -> Float[np.ndarray, "networks branches grid 4"]:
    """Log densities of the increments as polynomials in log g², at each of the factors; see `in_factor`."""
    coefficients = np.empty((data.sizes["network"], data.sizes["branch"], len(log_factors), 4))

    def fill(entry: BranchInput) -> None:
        D, nodes = data["increment"].values[entry.network, entry.branch], entry.nodes(log2=log2)
        with jax.enable_x64(True):  # noqa: FBT003
            table = _table(
                entry.block, jnp.asarray(entry.V), jnp.asarray(D), nodes, log_factors, jnp.asarray(entry.width)
            )
        coefficients[entry.network, entry.branch] = table

    over_inputs(fill, list(branch_inputs(data, order)))
    # Interpolation would spread a hole over all of the table.
    faulty = ~np.isfinite(coefficients).all(axis=(0, 2, 3))
    if faulty.any():
        branch = int(np.argmax(faulty))
        raise InputError(f"increment: branch {branch}: has no density by its block's law: are tokens nearly equal?")
    return coefficients


def labelled_coefficients(
    coefficients: Float[np.ndarray, "networks branches grid 4"], order: BlockOrder, data: xr.Dataset
) -> xr.Dataset:
    """The result of `branch_coefficients` as a Dataset, with the name of each branch's block as `part`."""
    dims = ("network", "branch", "log_factor", "degree")
    coords = {"log_factor": LOG_FACTORS} | {name: data[name].values for name in ("network", "branch")}
    dataset = xr.Dataset({"log_density": (dims, coefficients)}, coords=coords)
    return dataset.assign_coords(part=("branch", np.asarray(order.names)[list(order.part)]))


class BranchInput(NamedTuple):
    """The input V of a branch of a network of width n."""

    network: int
    branch: int
    part: int
    block: Block
    width: int
    V: Float[np.ndarray, "m m"]

    def nodes(self, *, log2: int | None = None, seed: int = 0) -> object:
        """Nodes of its own, so that the errors of increments are independent and do not add up over layers."""
        self.block.check_width(self.width)
        branch = self.block.branch
        state = np.random.SeedSequence([seed, self.network, self.branch]).generate_state(1)[0]
        log2 = branch.log2_nodes if log2 is None else log2
        return branch.nodes(len(self.V), self.width, log2=log2, seed=int(state))


def branch_inputs(data: xr.Dataset, order: BlockOrder) -> Iterator[BranchInput]:
    """The inputs of the branches of a Dataset, by branches and then networks."""
    for branch, part in enumerate(order.part):
        block = order.blocks[part]
        V = read_covariance(data, block, branch)
        for network, width in enumerate(data["width"].values):
            yield BranchInput(network, branch, part, block, int(width), V[network])


def over_inputs[T](run: Callable[[BranchInput], T], inputs: Sequence[BranchInput]) -> list[T]:
    """Results of a program for many inputs; its loops run on one core each.

    One input of each block is first, width by width, so that its program is compiled once: widths may share it.
    """
    first: dict[int, dict[int, int]] = {}
    for number, entry in enumerate(inputs):
        first.setdefault(entry.width, {}).setdefault(entry.part, number)
    rounds = [list(of_width.values()) for of_width in first.values()]
    rounds.append(sorted({*range(len(inputs))}.difference(*rounds)))
    results: dict[int, T] = {}
    for numbers in rounds:
        results |= zip(numbers, in_threads(run, [inputs[number] for number in numbers], alone=0), strict=True)
    return [results[number] for number in range(len(inputs))]


def law_of_increment(
    block: Block, V: Float[Array, "m m"], D: Float[Array, "m m"], nodes: object, *, width: Int[Array, ""] | int
) -> LogMatrixNormal:
    """The law of an observed increment's ΔΔᵀ/n of strength 1, given V of what the branch reads."""
    block.require_no_dropout("the density of increments has none: observe networks in evaluation mode")
    hidden = block.branch.moments(V, nodes, width=width)
    # The biases of the last map have the ratio to its weights that the block declares.
    bias = block.bias / jnp.square(block.strength)
    logarithm = block.branch.hidden_logarithm(V, hidden, nodes, bias=bias, width=width)
    return increment_law(D, hidden.mean + bias, logarithm, width=width)


@eqx.filter_jit
def _table(block, V, D, nodes, log_factors, width):
    def polynomial(log_factor):
        return law_of_increment(reshaped(block, log_factor), V, D, nodes, width=width).in_factor()

    return jax.lax.map(polynomial, jnp.asarray(log_factors))


def reshaped(block: Block, log_factor: ArrayLike) -> Block:
    """The block with its gain or temperature multiplied by a factor."""
    return eqx.tree_at(lambda block: block.branch, block, block.branch.reshaped(jnp.exp(log_factor)))


def interpolated(
    coefficients: Float[ArrayLike, "... grid 4"], log_factor: Float[ArrayLike, ""]
) -> Float[Array, "... 4"]:
    """The polynomials at another factor, by barycentric interpolation at Chebyshev's points."""
    dtype = jnp.result_type(coefficients, log_factor)
    weights = (-1.0) ** np.arange(len(LOG_FACTORS))
    weights[[0, -1]] /= 2
    distance = log_factor - jnp.asarray(LOG_FACTORS, dtype)
    is_node = distance == 0
    ratio = jnp.where(is_node.any(), is_node.astype(dtype), weights.astype(dtype) / jnp.where(is_node, 1.0, distance))
    return jnp.einsum("...gk,g->...k", coefficients, ratio / ratio.sum())
