"""Is a network initialised as it claims?"""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, get_args

import xarray as xr
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import checked, shown
from sdeinfer._files import InputError
from sdeinfer.auditing._describe import describe, drawn
from sdeinfer.auditing._inputs import TOKENS, check_inputs, default_inputs
from sdeinfer.auditing._judge import judge, log_densities
from sdeinfer.auditing._observe import Seen, observed
from sdeinfer.auditing._recipe import Matrix, Recipe, Role, declared
from sdeinfer.auditing._recipes import RECIPES
from sdeinfer.auditing._result import Audit
from sdeinfer.blocks import Block, SelfAttention
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance import Pattern
from sdeinfer.layers import AbstractLayer, Stack
from sdeinfer.observation import validate_branches


@checked
def audit(
    model: Any,
    inputs: Any = None,
    *,
    recipe: str | Recipe | Mapping[str, float] | None = None,
    branches: Mapping[str, Any] | None = None,
    architecture: AbstractLayer | None = None,
    pattern: Pattern | None = None,
    networks: int = 1,
    tokens: int = TOKENS,
    seed: int = 0,
    key: PRNGKeyArray | None = None,
) -> Audit:
    """Compare the residual branches of a network at initialisation with what a recipe declares, by one forward pass.

    `audit.recipes` has the recipes, and `audit.initialise` draws weights by them; `audit.scaling` is for models of
    several sizes, `audit.Monitor` for training.

    Arguments:
        model: a module of PyTorch, Flax (NNX) or Equinox; a function that draws one from a seed, `nnx.Rngs` or a key;
            or a Dataset of `observe_branches`.
        inputs: the model's input: one positional argument, or a mapping of keyword arguments. A model that is not
            causal needs short prompts, of at most 12 tokens. None for a short prompt, or a small image, that fits the
            configuration of a Hugging Face model.
        recipe: what is declared: a name of `audit.recipes.RECIPES`, a `Recipe`, or the standard deviation for each role
            of matrix; None to say only what is.
        branches: where the branches are, if their names are not well-known: for each kind a glob of module names, or a
            pair of them for what reads and what adds: `{"attention": "h.*.attn", "mlp": ("h.*.fc1", "h.*.fc2")}`.
        architecture: the blocks of one layer; None for those of the model's configuration.
        pattern: which tokens each token attends to, where neither the model nor the architecture tells, as for a mask
            that is an input of `nn.TransformerEncoder`. A Dataset has its own.
        networks: number of networks, if `model` is a function.
        tokens: number of tokens of each causal prompt that are observed, the first ones.
        seed: seed of the weights, if `model` is a function.
        key: PRNG key of the weights, if `model` is a function of a key or of `nnx.Rngs`; None for that of the seed.

    Returns:
        The `Audit`: its `passed`, `verdict`, `to_frame()` and `plot()`.

    Raises:
        InputError: if no branch is found, the blocks are not known, and as `observe_branches`.
    """
    if isinstance(model, xr.Dataset):
        if architecture is None:
            raise InputError("architecture: the blocks of one layer are needed beside a Dataset, as a si.Stack")
        name, sd, seen = "Dataset", None, Seen(validate_branches(model))
    else:
        network, _ = drawn(model)
        described = describe(network, patterns=branches, architecture=architecture, pattern=pattern)
        name, sd, architecture = described.name, described.sd, described.architecture
        inputs = default_inputs(network) if inputs is None else inputs
        first = check_inputs(network, inputs, architecture, tokens=tokens)
        del network  # one network in memory at a time
        seen = observed(model, inputs, described, networks=networks, tokens=first, seed=seed, key=key)
    return judged(seen, architecture, None if recipe is None else recipe_of(recipe, sd=sd), name=name, sd=sd)


def judged(seen: Seen, architecture: AbstractLayer, recipe: Recipe | None, *, name: str, sd: float | None) -> Audit:
    """The audit of what was observed; `name` and `sd` are those of `Description`."""
    blocks = with_pattern(architecture, Pattern.in_attributes(seen.data.attrs))
    if recipe is not None or sd is not None:
        # Without a recipe the first matrices are assumed to be as configured.
        layers = BlockOrder.of_data(blocks, seen.data).layers
        rule = recipe_of("normal", sd=sd) if recipe is None else recipe
        blocks = declared(blocks, rule, width=int(seen.data["width"][0]), layers=layers)
    return judge(seen, blocks, log_densities(seen.data, blocks), recipe, name=name, sd=sd)


def with_pattern(architecture: AbstractLayer, pattern: Pattern) -> Stack:
    """The blocks with another attention pattern: that of the observed tokens."""
    layers = architecture.layers if isinstance(architecture, Stack) else (architecture,)
    blocks = [
        dataclasses.replace(block, branch=dataclasses.replace(block.branch, pattern=pattern))
        if isinstance(block, Block) and isinstance(block.branch, SelfAttention)
        else block
        for block in layers
    ]
    return Stack(tuple(blocks))


def recipe_of(recipe: Any, sd: float | None = None) -> Recipe:
    """A recipe from its name, for which `sd` is that of the model's configuration, from a dict by role, or as it is."""
    match recipe:
        case Recipe():
            return recipe
        case str():
            return _named(recipe, sd)
        case Mapping():
            return _own(recipe)
    raise InputError(f"recipe: a name, a Recipe or a dict of standard deviations is needed, got {shown(recipe)}")


def _named(name: str, sd: float | None) -> Recipe:
    if name not in RECIPES:
        raise InputError(f"recipe: one of {', '.join(RECIPES)} is needed, got {shown(name)}")
    known = inspect.signature(RECIPES[name]).parameters
    missing = [each.name for each in known.values() if each.default is each.empty]
    if missing:
        examples = {"base_width": 256, "base_layers": 2}
        example = ", ".join(f"{each}={examples[each]}" for each in missing)
        raise InputError(f"recipe: {name} needs {' and '.join(missing)}: pass si.audit.recipes.{name}({example})")
    return RECIPES[name]() if sd is None or "sd" not in known else RECIPES[name](sd=sd)


def _own(sds: Mapping[Any, Any]) -> Recipe:
    """A recipe of standard deviations by role; it has the scale 1/√(2L) if those of the last matrices have."""
    for role, sd in sds.items():
        if role not in get_args(Role):
            raise InputError(f"recipe: roles are {', '.join(get_args(Role))}, got {shown(role)}")
        if not isinstance(sd, int | float):
            raise InputError(f"recipe: a standard deviation is needed for {role}, got {shown(sd)}")

    def of(matrix: Matrix) -> float:
        if matrix.role not in sds:
            raise InputError(f"recipe: a standard deviation is needed for {matrix.role}, got none")
        return sds[matrix.role]

    def factors(matrix: Matrix) -> dict[str, float]:
        first = {"attention output": "value", "mlp output": "up"}.get(matrix.role)
        scale = 1 / math.sqrt(2 * matrix.layers)
        known = first in sds and matrix.role in sds
        return {"1/√(2L)": scale} if known and math.isclose(sds[matrix.role], scale * sds[first], rel_tol=0.01) else {}

    return Recipe("the given standard deviations", "the user", of, factors=factors)
