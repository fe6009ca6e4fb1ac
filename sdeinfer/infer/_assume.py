"""Assumptions of a fit: the architecture, the law and the priors, checked before anything is computed."""

from collections.abc import Mapping
from typing import Any

import jax
import xarray as xr

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.infer._bridged import Latent
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._grouped import Grouped
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._problem import pose
from sdeinfer.infer._settings import LAWS, Law
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in, check_fittable, is_named, masked_as
from sdeinfer.likelihood import AbstractModel, with_pattern
from sdeinfer.likelihood._assumptions import Assumptions, checked_priors
from sdeinfer.likelihood._model import EveryLayer, Groups, LatentLayers
from sdeinfer.observation._dataset import INCOMPLETE, TOKENS, validate_labels


@pose.register
def pose_covariances(
    model: AbstractModel,
    data: xr.Dataset,
    *,
    architecture: str | AbstractLayer | type[AbstractLayer] | None,
    law: Law,
    prior: Mapping[str, Any] | None = None,
) -> tuple[xr.Dataset, AbstractCovariances]:
    """Validate the labels of covariances for a model; return the model's part of them, and the problem.

    A model of the package in a handler takes an architecture and priors as the model does. The covariances are not read
    here.
    """
    data, kind = model.select(validate_labels(data)), None
    if model.takes_architecture or architecture is not None or architecture_in(data.attrs) is not None:
        kind = architecture_of(data, architecture)
    if prior and not model.takes_architecture:
        raise InputError(f"prior: {model.name} builds its layers itself; the package's models take one")
    assumptions = Assumptions(kind, law, () if kind is None else checked_priors(prior, kind))
    sizes = {"networks": data.sizes["network"], "tokens": data.sizes["token_a"]}
    problem = problem_of(model, assumptions, **sizes, pattern=Pattern.in_attributes(data.attrs))
    if architecture is not None and not model.takes_architecture and problem.kind != kind:
        raise InputError(f"architecture: {model.name} builds its layers itself; the package's models take one")
    if problem.kind is not None:
        require_identifiable(problem.kind, data.sizes["token_a"])
        require_complete(problem.kind, data)
    return masked(data, problem.kind, law, model), problem


def architecture_of(data: xr.Dataset, architecture: str | AbstractLayer | type[AbstractLayer] | None) -> AbstractLayer:
    """The architecture to fit: the one requested, or the one named by the data.

    If the requested name is that of the data, sizes such as the number of heads are taken from the data; the attention
    pattern always is, unless an architecture has one of its own.
    """
    if architecture is not None and not isinstance(architecture, str):
        kind = template(architecture)
        check_fittable(kind)
        could_have_one = is_named(kind) and kind.pattern.everything
        return masked_as(kind, Pattern.in_attributes(data.attrs)) if could_have_one else kind
    if architecture is None or architecture == data.attrs.get("architecture"):
        kind = architecture_in(data.attrs)
    else:
        kind = masked_as(template(architecture), Pattern.in_attributes(data.attrs))
    if kind is None:
        raise InputError(f"architecture: the data do not name it; choose one of {', '.join(ARCHITECTURES)}, or a layer")
    return kind


def masked(data: xr.Dataset, kind: AbstractLayer | None, law: str, model: AbstractModel | None = None) -> xr.Dataset:
    """The data in the coordinates of an architecture's attention pattern; unchanged without an architecture."""
    if kind is None:
        return data
    if not kind.pattern.everything and (isinstance(model, Groups) or not isinstance(model, EveryLayer | None)):
        raise InputError(f"model: {model.name} knows no attention pattern but the full one; models.full_path does")
    if law != "limit":
        # Raise the one-line error of a layer without this law.
        jax.eval_shape(lambda layer, width: layer.finite_width(width), kind, 128.0)
    return with_pattern(data, kind.pattern)


def require_settings(law: str, **counts: int) -> None:
    """Check the settings of a fit."""
    if law not in LAWS:
        raise InputError(f"law: must be one of {', '.join(LAWS)}, got {law!r}")
    at_least_one(**counts)


LARGEST_TOKENS = 24
"""Largest number of tokens of a fit with an attention pattern, for which p = 300."""


def require_complete(kind: AbstractLayer, data: xr.Dataset) -> None:
    """Check that the data of layers with attention have all tokens to which theirs attend, and not too many."""
    if not kind.coordinates.temperatures:
        return
    tokens = data.sizes["token_a"]
    if data.attrs.get(INCOMPLETE) or data.attrs.get(TOKENS, tokens) != tokens:
        raise InputError(
            f"tokens: {kind.name} attends to tokens that were left out: observe whole prompts, or with a causal mask "
            "the first tokens of each, as by si.take(data, prompts=…, tokens=…)"
        )
    if tokens > LARGEST_TOKENS and not kind.pattern.everything:
        raise InputError(
            f"tokens: {tokens} tokens have {tokens * (tokens + 1) // 2} covariances, and a pattern costs the cube "
            f"of that for each layer: take at most {LARGEST_TOKENS}, by si.take(data, prompts=…, tokens=…)"
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
                    f"model: {model.name} knows the package's terms of a limit only; models.full_path takes others"
                )
            return Latent(model, assumptions, assumptions.kind)
        case Groups():
            return Grouped(model, assumptions, assumptions.kind)
        case EveryLayer():
            return Networks.of(model, assumptions, networks=networks, tokens=tokens, pattern=pattern)
    raise InputError(f"model: {model.name} is no model of observed networks")
