"""Initialise a model by a recipe, and audit it at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.auditing._audit import judged, recipe_of, with_pattern
from sdeinfer.auditing._describe import describe, drawn
from sdeinfer.auditing._find import module_at
from sdeinfer.auditing._inputs import TOKENS, check_inputs, default_inputs
from sdeinfer.auditing._observe import observed, scaled
from sdeinfer.auditing._recipe import Matrix, Recipe, Role, declared, matrices
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._weights import Weights, filled, weights_of, width_of
from sdeinfer.blocks import SelfAttention
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance import Pattern
from sdeinfer.layers import AbstractLayer, Stack


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Initialised:
    """A model with new weights.

    Attributes:
        model: the model: of PyTorch the same object, of Flax and Equinox a new one.
        audit: its audit against the recipe; None if it was not asked for.
        matrices: one row for each array of weights: its path, layer, matrices and standard deviations.
    """

    model: Any
    audit: Audit | None
    matrices: pd.DataFrame

    def __repr__(self) -> str:
        """The verdict of the audit."""
        return f"{len(self.matrices)} matrices drawn; {'not audited' if self.audit is None else self.audit}"


@checked
def initialise(
    model: Any,
    recipe: str | Recipe | Mapping[str, float] | Sequence[Recipe],
    inputs: Any = None,
    *,
    branches: Mapping[str, Any] | None = None,
    architecture: AbstractLayer | None = None,
    pattern: Pattern | None = None,
    roles: Mapping[str, Any] | None = None,
    width: int | None = None,
    tokens: int = TOKENS,
    audited: bool = True,
    seed: int = 0,
) -> Initialised:
    """Draw the weights of a model's residual branches by a recipe, and audit what the model then does.

    Weights and biases of the branches are independent normals; all others, as embeddings and norms, are left alone. So
    is the forward pass: a recipe with a multiplier, a skip or a temperature needs a model that has them, and the audit
    says whether it does.

    Arguments:
        model: a module of PyTorch, which is changed in place; of Flax (NNX) or Equinox, of which a new one is made; or
            a function that draws one, see `audit`.
        recipe: see `audit`; or one `Recipe` for each layer, which differ in the strengths of branches alone.
        inputs: the model's input, see `audit`.
        branches: where the branches are, see `audit`.
        architecture: the blocks of one layer; None for those of the model's configuration.
        pattern: which tokens each token attends to, see `audit`.
        roles: for names of modules that are not well-known, what their weights are: a glob of their path to a role, or
            to several for one array: `{"layers.*.mix.w_in": ("query", "key", "value")}`.
        width: n, to be checked; None for any.
        tokens: number of tokens of each causal prompt that are observed.
        audited: whether to run the model and audit it.
        seed: seed of the weights.

    Raises:
        InputError: as `audit`; for weights whose role is not known or whose size is not that of the blocks, and for
            another number of recipes than of layers. The model is not changed then.
    """
    network, _ = drawn(model, seed=seed)
    described = describe(network, patterns=branches, architecture=architecture, pattern=pattern)
    inputs = default_inputs(network) if inputs is None and audited else inputs
    first = check_inputs(network, inputs, described.architecture, tokens=tokens) if audited else None
    arrays = weights_of(network, described, roles)
    layers, n = 1 + max(each.layer for each in arrays), width_of(network, arrays)
    if width not in (None, n):
        raise InputError(f"width: {described.name} has {n}, and {width} is needed")
    rules = list(recipe) if isinstance(recipe, list | tuple) else [recipe] * layers
    rules = [recipe_of(each, sd=described.sd) for each in rules]
    if len(rules) != layers:
        raise InputError(f"recipe: {len(rules)} were given for {layers} layers")
    factors = _factors(described.architecture, rules, width=n)
    branches_of_layer = [block.branch for block in BlockOrder.of(described.architecture, depth=1).blocks]
    heads = next((branch.heads for branch in branches_of_layer if isinstance(branch, SelfAttention)), 1)
    sizes = _matrices(described.architecture, width=n, layers=layers)
    # A module of PyTorch is changed in place, and must be as it was where it cannot run.
    modules = [module_at(network, each.path) for each in arrays if audited and described.library == "torch"]
    kept = [(each, each.detach().clone()) for module in modules for each in module.parameters(recurse=False)]
    network = filled(network, described, arrays, sizes, rules, heads=heads, seed=seed)
    table = _table(arrays, sizes, rules)
    if not audited:
        return Initialised(network, None, table)
    try:
        seen = observed(network, inputs, described, networks=1, tokens=first, seed=seed, key=None)
    except BaseException:  # the model's own, too
        for parameter, values in kept:
            parameter.data.copy_(values)
        raise
    order = BlockOrder.of_data(with_pattern(described.architecture, Pattern.in_attributes(seen.data.attrs)), seen.data)
    number = np.arange(len(order.part)) // len(order.blocks)
    # Increments are compared with those of the first layer's recipe.
    seen = dataclasses.replace(seen, data=scaled(seen.data, 1 / factors[number, np.asarray(order.part)][None]))
    found = judged(seen, described.architecture, rules[0], name=described.name, sd=described.sd)
    return Initialised(network, found, table)


def standard_deviations(architecture: AbstractLayer, recipes: Sequence[Recipe], *, width: int) -> pd.DataFrame:
    """The weights of a network, for those who draw them elsewhere: one row for each matrix, and layer if these differ.

    Arguments:
        architecture: the blocks of one layer.
        recipes: a recipe for each layer.
        width: n.

    Returns:
        A table with the columns layer, matrix, fan_in, fan_out, sd and, where there are any, bias_sd.
    """
    blocks = architecture if isinstance(architecture, Stack) else Stack((architecture,))
    layers = len(recipes)
    rows = [
        {
            "layer": number,
            "matrix": role,
            "fan_in": matrix.fan_in,
            "fan_out": matrix.fan_out,
            "sd": recipe.sd(matrix),
            "bias_sd": recipe.bias_sd(matrix),
        }
        for number, recipe in enumerate(recipes)
        for own in _matrices(blocks, width=width, layers=layers).values()
        for role, matrix in own.items()
    ]
    table = pd.DataFrame(rows)
    if len(dict.fromkeys(recipes)) == 1:
        table = table[table["layer"] == 0].assign(layer="all")
    return table if table["bias_sd"].to_numpy(float).any() else table.drop(columns="bias_sd")


def _matrices(architecture: Stack, *, width: int, layers: int) -> dict[str, dict[Role, Matrix]]:
    """The matrices of each kind of branch."""
    return {
        block.branch.kind: matrices(block, width=width, layers=layers)
        for block in BlockOrder.of(architecture, depth=1).blocks
    }


def _factors(architecture: Stack, recipes: Sequence[Recipe], *, width: int) -> Float[np.ndarray, "layers blocks"]:
    """Strengths of each layer's blocks over those of the first; recipes that differ in more are refused."""
    blocks = {
        each: BlockOrder.of(declared(architecture, each, width=width, layers=len(recipes)), depth=1).blocks
        for each in dict.fromkeys(recipes)
    }
    # Gains, temperatures, and biases of last matrices, which must scale as the strength does.
    others = [
        [
            (float(getattr(block.branch, block.branch.shape.name)), block.bias / float(block.strength) ** 2)
            for block in own
        ]
        for own in blocks.values()
    ]
    if not np.allclose(others, others[0]):
        raise InputError("recipe: those of layers may differ in strengths alone, not in gains, temperatures or biases")
    strengths = np.array([[float(block.strength) for block in blocks[each]] for each in recipes])
    return strengths / strengths[0]


def _table(
    arrays: Sequence[Weights], sizes: Mapping[str, Mapping[Role, Matrix]], rules: Sequence[Recipe]
) -> pd.DataFrame:
    rows = [
        {
            "path": each.path,
            "layer": each.layer,
            "matrix": role,
            "fan_in": sizes[each.kind][role].fan_in,
            "sd": rules[each.layer].sd(sizes[each.kind][role]),
        }
        for each in arrays
        for role in each.roles
    ]
    return pd.DataFrame(rows)
