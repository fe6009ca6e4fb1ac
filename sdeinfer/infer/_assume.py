"""Before a fit: its architecture, law and priors, checked before anything is computed; its device and precision.

Tests: `tests/infer/test_fit.py`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer._threads import on_cpu
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.infer._branches import pose_branches
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._grouped import Grouped
from sdeinfer.infer._latent import Latent
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._problem import AbstractProblem
from sdeinfer.infer._settings import Law
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import architecture_in, check_fittable, is_named, masked_as
from sdeinfer.likelihood import AbstractModel, with_pattern
from sdeinfer.likelihood._assumptions import Assumptions, checked_priors
from sdeinfer.likelihood._model import EveryLayer, GroupModel, LatentLayers
from sdeinfer.observation._dataset import INCOMPLETE, TOKENS, validate_labels


@functools.singledispatch
def pose(
    model: AbstractModel,
    data: xr.Dataset,
    *,
    architecture: str | AbstractLayer | type[AbstractLayer] | None,
    law: Law,
    prior: Mapping[str, Any] | None = None,
) -> tuple[xr.Dataset, AbstractProblem]:
    """The model's part of valid data, and the problem of fitting it; of covariances the labels alone are validated.

    A model of other data registers a function here.
    """
    data = model.select(validate_labels(data))
    kind = architecture_of(data, architecture)
    if prior and not model.takes_architecture:
        raise InputError(
            f"prior: {model.name} is your own program, which sets its own priors; prior= is for the package's models"
        )
    assumptions = Assumptions(kind, law, () if kind is None else checked_priors(prior, kind))
    sizes = {"networks": data.sizes["network"], "tokens": data.sizes["token_a"]}
    problem = problem_of(model, assumptions, **sizes, pattern=Pattern.in_attributes(data.attrs))
    if architecture is not None and not model.takes_architecture and problem.kind != kind:
        raise InputError(
            f"architecture: {model.name} is your own program, which builds its own layers; architecture= is for "
            "the package's models"
        )
    if problem.kind is not None:
        require_identifiable(problem.kind, data.sizes["token_a"])
        require_complete(problem.kind, data)
    return masked(data, problem.kind, law, model), problem


pose.register(pose_branches)


def architecture_of(
    data: xr.Dataset, architecture: str | AbstractLayer | type[AbstractLayer] | None
) -> AbstractLayer | None:
    """The architecture to fit: of the data if these have its name, or else with their mask unless it has its own.

    None if neither the data nor the caller name one.
    """
    by_name = isinstance(architecture, str)
    if architecture is None or (by_name and architecture == data.attrs.get("architecture")):
        return architecture_in(data.attrs)
    kind = template(architecture)
    if not by_name:
        check_fittable(kind)
        if not (is_named(kind) and kind.pattern.everything):
            return kind
    return masked_as(kind, Pattern.in_attributes(data.attrs))


def masked(data: xr.Dataset, kind: AbstractLayer | None, law: str, model: AbstractModel | None = None) -> xr.Dataset:
    """The data in the coordinates of an architecture's attention pattern; unchanged without an architecture."""
    if kind is None:
        return data
    if not kind.pattern.everything and (isinstance(model, GroupModel) or not isinstance(model, EveryLayer | None)):
        raise InputError(f"model: {model.name} supports unmasked attention only; use models.full_path")
    if law != "limit":
        # Raise the one-line error of a layer without this law.
        jax.eval_shape(lambda layer, width: layer.finite_width(width), kind, 128.0)
    return with_pattern(data, kind.pattern)


def require_laws(**laws: str) -> None:
    for name, value in laws.items():
        if value not in (known := get_args(Law)):
            raise InputError(f"{name}: must be one of {', '.join(known)}, got {value!r}")


def require_complete(kind: AbstractLayer, data: xr.Dataset) -> None:
    """Check that the data have all tokens to which theirs attend, and not too many."""
    if not kind.coordinates.temperatures:
        return
    tokens = data.sizes["token_a"]
    if data.attrs.get(INCOMPLETE) or data.attrs.get(TOKENS, tokens) != tokens:
        raise InputError(
            f"tokens: {kind.name} attends to tokens that were left out: observe whole prompts, or with a causal mask "
            "the first tokens of each, as by si.take(data, prompts=…, tokens=…)"
        )
    most = 24  # with an attention pattern: p = 300
    if tokens > most and not kind.pattern.everything:
        raise InputError(
            f"tokens: {tokens} tokens have {tokens * (tokens + 1) // 2} covariances, and a pattern costs the cube "
            f"of that for each layer: take at most {most}, by si.take(data, prompts=…, tokens=…)"
        )


def require_identifiable(kind: AbstractLayer, tokens: int) -> None:
    """Check that the tokens suffice to identify the parameters of an architecture."""
    if not kind.coordinates.temperatures or kind.pattern.mask(tokens).sum(axis=1).max() > 1:
        return
    if tokens == 1:
        raise InputError(
            f"tokens: {kind.name} has tau0, which one token cannot identify; use feedforward or mlp, or two tokens"
        )
    raise InputError(
        f"pattern: {kind.name} has tau0, which tokens that attend to one token each cannot identify, as with prompts "
        "of one token; use feedforward or mlp"
    )


def problem_of(
    model: AbstractModel,
    assumptions: Assumptions,
    *,
    networks: int = 2,
    tokens: int = 2,
    pattern: Pattern = EVERY_TOKEN,
) -> AbstractCovariances:
    """The problem of fitting a model; a program of a user is traced on data of this shape."""
    match model:
        case LatentLayers():
            if assumptions.other_terms:
                raise InputError(
                    f"model: {model.name} supports the package's terms only; use models.full_path with other terms"
                )
            return Latent(model, assumptions, assumptions.kind)
        case GroupModel():
            return Grouped(model, assumptions, assumptions.kind)
        case EveryLayer():
            return Networks.of(model, assumptions, networks=networks, tokens=tokens, pattern=pattern)
    raise InputError(f"model: {model.name} is no model of observed networks")


def placed[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of fits, so that it runs where it is fast, and in double precision whatever JAX's.

    In single precision a likelihood far from the data has no slope, where the search for the mode starts, and sums over
    65,536 terms are resolved to a few hundredths.

    Small fits run on the CPU beside an accelerator: README's took 26 s on an H100, and 2.3 s on the CPU beside it.
    Those with latent layers, which are large, and those in `jax.default_device` run where the caller's programs run.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        device = jax.config.jax_default_device
        latent = any(isinstance(value, LatentLayers) for value in (*args, *kwargs.values()))
        if device is None and not on_cpu() and not latent:
            device = _host()
        with jax.default_device(device), jax.enable_x64(True):  # noqa: FBT003
            return function(*args, **kwargs)

    return wrapped


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None
