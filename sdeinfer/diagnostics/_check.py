"""Whether to believe a fit, and why not."""

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats

from sdeinfer._files import InputError
from sdeinfer.diagnostics._identification import identification
from sdeinfer.diagnostics._innovations import DIRECTIONS, innovation_tests
from sdeinfer.diagnostics._predictive import distance_from_theory, left_out_p_values
from sdeinfer.diagnostics._summary import constants_of, identified_of, summarise
from sdeinfer.diagnostics._verdict import Check, Verdict, at_least, at_most
from sdeinfer.infer import architecture_of, logit_scale
from sdeinfer.layers import ARCHITECTURES, AbstractArchitecture, AbstractLayer, architecture_in
from sdeinfer.likelihood import USED, used_of
from sdeinfer.observation import validate

RHAT = 1.01
ESS = 400
PARETO_K = 0.7
LOGITS = {"finite-width": 0.7, "limit": 0.35}
"""Largest spread of the logits in a row of the softmax at which a law can be believed: see `infer.in_range`."""
LEFT_OUT = 0.5
DEVIATIONS = 4.0
DIVERGENT = 1e-3
"""Part of the draws: single ones, where a parameter may reach the end of its range, do no harm."""
BFMI = 0.3
CONTRACTION = 0.5
MANY = 1e6

LEVEL = 0.01
"""Probability of a false alarm by each of the two tests of calibration."""

FEWEST = 8
"""Networks below which their spread tells nothing."""

FLOORS = 3.0
"""A distance of samples of one law is about its floor, give or take half of it."""

THEORY = "agrees with the theory"


def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | AbstractArchitecture | None = None,
) -> Check:
    """Judge a fit: its sampler, what the data say of each parameter, whether the networks obey the law, and the truth.

    - converged: R-hat, effective draws, divergences, and the energy's BFMI. Of an approximation, the Pareto k of its
      importance weights instead.
    - identified: the contraction of each posterior from its prior, or what the Fisher information allows of it if that
      is less; see `identification`. Not asked of layers that do not obey the law: it has nothing to identify.
    - calibrated: the one-step innovations in eight directions (`innovation_tests`), where every layer was observed, and
      each network given all others (`left_out_transforms`). Each of the two raises a false alarm with probability
      `LEVEL`, however many directions and quantities it looks at.
    - agrees with the theory: networks after the last layer against the SDE; and the range of the law.
    - true: each parameter against the truth, where it is known.

    Latent layers are layers of the networks, one by one, and not steps of a solver: there is none to be halved.

    Arguments:
        post: the result of `fit` or of `approximate`.
        data: the data that were fitted; the posterior's own copy where None.
        architecture: the layer of a fit of a user's own type of layer, which a posterior cannot hold.

    Returns:
        The verdicts, each with its number, its threshold and what to do; and the tests that could not be made.
    """
    data = observed(post) if data is None else validate(data)
    table = summarise(post)
    kind = _kind_of(post, data, architecture)
    skipped = _skipped(post, kind)
    verdicts = [*_of_innovations(post, data, kind), *_of_range(post, data, kind)]
    obeyed = all(verdict.passed for verdict in verdicts)
    approximate = "pareto_k" in post.attrs
    sampled = table.drop(index=[name for name in constants_of(post) if name in table.index])
    verdicts += _of_approximation(post) if approximate else _of_chains(sampled)
    if obeyed:
        verdicts += _of_identification(post, data, kind)
    if not approximate:
        verdicts += _of_geometry(post)
    verdicts += _of_predictions(post, data)
    for name in identified_of(post):
        if np.isfinite(table.loc[name, "truth"]):
            row = table.loc[name]
            deviations = abs(row["mean"] - row["truth"]) / row["sd"]
            advice = "posterior sds away: the model does not fit"
            verdicts.append(at_most("true", f"{name} against truth", deviations, DEVIATIONS, advice))
    return Check(tuple(verdicts), skipped)


def _kind_of(
    post: xr.DataTree,
    data: xr.Dataset,
    architecture: AbstractLayer | type[AbstractLayer] | AbstractArchitecture | None,
) -> AbstractArchitecture | None:
    """The kind of layer that was fitted; None for a user's own that is not given."""
    if architecture is None:
        return architecture_in(post.attrs) if post.attrs.get("architecture") in ARCHITECTURES else None
    kind = architecture_of(data, architecture)
    if kind.name != post.attrs.get("architecture"):
        raise InputError(f"architecture: the fit is of {post.attrs.get('architecture')}, got {kind.name}")
    return kind


def _skipped(post: xr.DataTree, kind: AbstractArchitecture | None) -> tuple[str, ...]:
    """The tests that cannot be made, and why."""
    skipped = []
    if not post.attrs.get("every_layer"):
        skipped.append("one-step innovations: layers are latent")
    elif kind is None:
        name = post.attrs.get("architecture")
        skipped.append(f"one-step innovations and the range of the law: give the layer, architecture={name}")
    if "posterior_predictive" not in post.children:
        skipped.append("networks left out and distance from the SDE: there are no predictions")
    return tuple(skipped)


def observed(post: xr.DataTree) -> xr.Dataset:
    """The data that a posterior was fitted to."""
    data, constant = (post.children[group].to_dataset() for group in ("observed_data", "constant_data"))
    if USED in constant:
        data = data.assign({USED: constant[USED]})
    return validate(data.assign_coords(width=("network", constant["width"].values)))


def _of_chains(table: pd.DataFrame) -> list[Verdict]:
    longer = "run longer: more warmup and more draws"
    return [
        at_most("converged", "R-hat", table["rhat"].max(skipna=False), RHAT, longer, strict=True),
        at_least("converged", "bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        at_least("converged", "tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
    ]


def _of_geometry(post: xr.DataTree) -> list[Verdict]:
    """What a posterior that is hard to explore shows, as that of parameters of which the data say little is."""
    statistics = post["sample_stats"].to_dataset()
    advice = "the posterior is hard to explore, where the data say little or contradict the law: raise the warmup"
    verdicts = [at_most("converged", "divergences", statistics["diverging"].mean(), DIVERGENT, advice)]
    if "energy" in statistics:
        smallest = float(np.min(array_stats.bfmi(statistics["energy"].values)))
        advice = "the sampler explores the posterior's energies too slowly: run longer"
        verdicts.append(at_least("converged", "BFMI", smallest, BFMI, advice))
    return verdicts


def _of_approximation(post: xr.DataTree) -> list[Verdict]:
    advice = "the posterior is not near to normal: use fit"
    return [at_most("converged", "Pareto k", post.attrs["pareto_k"], PARETO_K, advice)]


def _of_identification(post: xr.DataTree, data: xr.Dataset, kind: AbstractArchitecture | None) -> list[Verdict]:
    if "prior" not in post.children:
        return []
    verdicts = []
    table = identification(post, data, kind)
    for name in table.index:
        advice = f"the data say little of {name}"
        if "networks" in table:
            times = float(table.loc[name, "networks"])
            advice += f"; to know it to 10 % takes {times:.2g} times as many" if times < MANY else "; nor would more"
            advice += " networks like these, or others: `sdeinfer design`"
        contraction = table.loc[name, ["contraction", "expected"] if "expected" in table else ["contraction"]].min()
        verdicts.append(at_least("identified", f"{name} contraction", contraction, CONTRACTION, advice))
    return verdicts


def _of_innovations(post: xr.DataTree, data: xr.Dataset, kind: AbstractArchitecture | None) -> list[Verdict]:
    if kind is None or not post.attrs.get("every_layer"):
        return []
    directions = innovation_tests(post, data, kind)
    worst = str(directions["p"].idxmin())
    p = min(1.0, directions["p"].min() * len(directions))
    advice = f"not layers of a shaped {kind.name}, by {worst}: {DIRECTIONS[worst]}"
    return [at_least("calibrated", "one-step innovations, p", p, LEVEL, advice)]


def _of_range(post: xr.DataTree, data: xr.Dataset, kind: AbstractArchitecture | None) -> list[Verdict]:
    if kind is None or not kind.coordinates.temperatures:
        return []
    used = used_of(data)
    layers = post["layers"].to_dataset()
    tau0 = np.min([layers[name].values for name in kind.coordinates.temperatures], axis=0)
    largest = (logit_scale(data) / tau0[:, None])[used].max()
    smaller = "the law expands the softmax: lower largest_logit, use smaller tokens or wider networks"
    bound = LOGITS[post.attrs.get("law", "limit")]
    outside = (
        "most of the data start outside the range of the law: tokens are too large for τ0, networks too narrow, or the "
        "temperature is not τ0 √(n n_k)"
    )
    left_out = 1.0 if "out_of_range" in post.attrs else 1 - used.mean()
    return [
        at_most(THEORY, "logit spread, largest", largest, bound, smaller),
        at_most(THEORY, "transitions left out", left_out, LEFT_OUT, outside),
    ]


def _of_predictions(post: xr.DataTree, data: xr.Dataset) -> list[Verdict]:
    if "posterior_predictive" not in post.children:
        return []
    verdicts = []
    if data.sizes["network"] >= FEWEST:
        each = left_out_p_values(post)
        advice = f"{each.idxmin()} after the last layer is not spread over networks as the SDE says"
        p = min(1.0, each.min() * len(each))
        verdicts.append(at_least("calibrated", "networks left out, p", p, LEVEL, advice))
    distances = distance_from_theory(post)
    ratio = distances["wasserstein"] / distances["floor"]
    far = distances.loc[ratio.idxmax()]
    advice = (
        f"{ratio.idxmax()} after the last layer is {far['wasserstein']:.2g} sds from the SDE, where samples of one law "
        f"would be {far['floor']:.2g}: another architecture, or networks too narrow for the limit"
    )
    return [*verdicts, at_most(THEORY, "distance from the SDE, floors", ratio.max(), FLOORS, advice)]
