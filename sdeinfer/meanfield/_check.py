"""Verdicts on a fit of observed tokens."""

from collections.abc import Callable

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Array, Float
from numpyro import handlers

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import (
    EFFECT,
    LEVEL,
    MOVE,
    Check,
    Verdict,
    at_most,
    draws_of,
    fixed_of,
    identified_of,
    of_contractions,
    of_truth,
    sampler_verdicts,
    summarise,
    with_precision,
)
from sdeinfer.meanfield import _models
from sdeinfer.meanfield._flow import SelfAttentionFlow, on_sphere
from sdeinfer.meanfield._laws import AbstractTokenLaw, ObservedFlow
from sdeinfer.meanfield._misfits import CAUSES, FITTED, OF_NOISE, PULL, misfits
from sdeinfer.meanfield._models import TokenModel, token_model
from sdeinfer.meanfield._path import token_path


@checked
def check(
    post: xr.DataTree, *, model: Callable[..., None] | None = None, flow: SelfAttentionFlow | None = None
) -> Check:
    """Check a fit of observed tokens: the law, convergence, identification, and the truth if known.

    - calibrated: score tests of the law in the directions of `misfits`. A misfit fails if it is significant and larger
      than `diagnostics.EFFECT`, or moves a parameter by more than `diagnostics.MOVE` posterior standard deviations: the
      verdict then says "not this law". Others are notes.
    - converged: R-hat, effective sample sizes, divergences and BFMI; and, of `trajectory`, that the error of the solver
      moves no parameter by more than `diagnostics.MOVE` posterior standard deviations.
    - identified: the contraction of each posterior from its prior, of positive parameters in logarithms. Left out if
      the law does not hold.
    - true: each parameter against the truth, if known.

    Arguments:
        post: the result of `fit`.
        model: the program that was fitted, if it is none of the package's.
        flow: the flow that was given to `fit`.
    """
    if "covariance" in post.children.get("observed_data", xr.DataTree()).data_vars:
        raise InputError("post: is a fit of covariances; si.check takes it")
    table = summarise(post)
    names = identified_of(post)
    law, tokens = fitted_law(post, model, flow=flow)
    if np.isfinite(law.means(tokens)).all():
        verdicts, notes = _of_misfits(misfits(law, tokens), post, names)
    else:
        advice = "not this law: it is not finite at the posterior means, as where chains did not meet"
        verdicts, notes = [at_most("calibrated", "misfit of the layers", np.nan, EFFECT, advice)], []
    obeyed = all(verdict.passed for verdict in verdicts)
    of_sampler, rough = sampler_verdicts(post, table.loc[names])
    verdicts += of_sampler
    if isinstance(law, ObservedFlow):
        advice = "one step of the solver for each layer is too coarse: fit layer_trajectory, or observe more layers"
        verdicts.append(at_most("converged", "error of the flow's solver", float(law.solver_error()), MOVE, advice))
    contracted, unidentified = of_contractions(post, names if obeyed else [])
    verdicts += [*contracted, *of_truth(table.loc[names])]
    identified = tuple(with_precision(name, table) for name in names if name not in unidentified)
    return Check(tuple(verdicts), (), identified, unidentified, tuple([*notes, *rough]))


def fitted_law(
    post: xr.DataTree, model: Callable[..., None] | None = None, *, flow: SelfAttentionFlow | None = None
) -> tuple[AbstractTokenLaw, Float[Array, "networks layers n D"]]:
    """The law of the tokens at the posterior means, and the observed tokens; arguments as of `check`."""
    first, later = (post[group].to_dataset() for group in ("constant_data", "observed_data"))
    tokens = [first["initial"].expand_dims("layer"), later["tokens"]]
    path = token_path(xr.concat(tokens, "layer").to_dataset(name="tokens"), flow=flow)
    means = {str(name): draws.mean(("chain", "draw")).values for name, draws in post["posterior"].data_vars.items()}
    values = {name: jnp.asarray(value) for name, value in (means | fixed_of(post)).items()}
    if "start" in values:
        values["start"] = on_sphere(values["start"])
    program = handlers.substitute(handlers.seed(_model_of(post, model), jr.key(0)), values)
    assert path.observed is not None
    return handlers.trace(program).get_trace(path)["tokens"]["fn"], path.observed


def _of_misfits(table: pd.DataFrame, post: xr.DataTree, names: list[str]) -> tuple[list[Verdict], list[str]]:
    """Verdicts on the largest misfit and on the largest move, and notes on small ones."""
    significant = table.loc[table["p"] * len(table) < LEVEL]
    draws = draws_of(post)
    sds = pd.Series({name: float(np.log(draws[name]).std()) for name in FITTED if name in names}, dtype=float)
    each = significant.loc[:, list(sds.index)].abs() / sds
    moves = each.max(axis=1) if len(sds) else pd.Series(0.0, significant.index)
    # The step and β are moved themselves, by as many posterior sds as their score has.
    moves = moves.where(moves.index != PULL, np.sqrt(significant["statistic"]))
    sizes = {
        "misfit of the layers": (significant["effect"], EFFECT),
        "move by the misfit, posterior sds": (moves, MOVE),
    }
    verdicts = [
        at_most("calibrated", name, max(size, default=0.0), threshold, _cause(size[size > threshold]))
        for name, (size, threshold) in sizes.items()
    ]
    small = dict(significant.loc[(significant["effect"] <= EFFECT) & (moves <= MOVE), "effect"])
    return verdicts, [f"{name} {effect:.2g}, small: {CAUSES[str(name)]}" for name, effect in small.items()]


def _cause(large: pd.Series) -> str:
    """Diagnosis by the largest misfit: one of the means if there is any, since it shows in the noise too."""
    of_means = large.drop(index=[name for name in OF_NOISE if name in large.index])
    return f"not this law: {CAUSES[str((of_means if len(of_means) else large).idxmax())]}" if len(large) else ""


def _model_of(post: xr.DataTree, model: Callable[..., None] | None) -> TokenModel:
    if model is not None:
        return token_model(model)
    found = getattr(_models, str(post.attrs.get("model")), None)
    if not isinstance(found, TokenModel):
        raise InputError(f"model: the fit is of {post.attrs.get('model')}, give the program: model=…")
    return found
