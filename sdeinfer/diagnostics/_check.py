"""Verdicts on a fit, with advice."""

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics._excluded import excluded_layers
from sdeinfer.diagnostics._fitted import fitted_data
from sdeinfer.diagnostics._identification import has_prior, identification
from sdeinfer.diagnostics._layers import LEVEL, has_alternatives, layers_against_law
from sdeinfer.diagnostics._predictive import all_exploded, count_predictions, distance_from_theory, left_out_p_values
from sdeinfer.diagnostics._summary import constants_of, identified_of, summarise, with_chain
from sdeinfer.diagnostics._verdict import IN_RANGE, THEORY, Check, Verdict, at_least, at_most
from sdeinfer.infer import architecture_of, in_enough_precision, logit_scale, mean_spread
from sdeinfer.layers import ARCHITECTURES, AbstractLayer, Architecture, architecture_in
from sdeinfer.likelihood import used_of

RHAT, ROUGH_RHAT = 1.05, 1.01
"""Upper bound on R-hat: the means of chains then differ by about 0.3 posterior sds. Above the second bound, means are
rough, and a note says so."""

ESS, ROUGH_ESS = 100, 400
"""Smallest acceptable effective sample size, for Monte Carlo errors of 0.1 posterior sds; below the second bound, means
are rough."""

PARETO_K = 0.7
"""Largest acceptable Pareto k of an approximation's importance weights."""

SPREAD = {"finite-width": 1.5, "limit": 0.75}
"""Largest acceptable mean spread of the logits in a row of the softmax, weighted by the information on τ0 (∝ s⁴)."""

LEAST_USED, FEWEST_USED = 0.05, 0.01
"""Fraction of transitions inside the range of the law below which the others are compared with exact layers; and the
smallest acceptable one where they cannot be."""

MANY_LEFT_OUT = 0.5
"""Fraction of transitions left out above which a note says so."""

EXCLUDED = 6.0
"""Largest acceptable distance of layers outside the range from exact ones, in standard deviations of 24 draws."""

DEVIATIONS = 4.0
"""Largest acceptable distance of the posterior mean from the truth, in posterior standard deviations."""

DIVERGENT = 0.01
"""Largest acceptable fraction of divergent draws; they can move a mean by some hundredths of a posterior sd."""

BFMI = 0.3
"""Smallest acceptable BFMI (Bayesian fraction of missing information)."""

CONTRACTION = 0.5
"""Smallest acceptable contraction from prior to posterior variance."""

MANY = 1e6
"""Factor in the number of networks above which the advice does not suggest more networks."""

FEWEST = 8
"""Smallest number of networks for the test of networks left out."""

FLOORS = 3.0
"""Largest acceptable distance from the SDE, in units of its floor; samples of one law are at 1 ± 0.5."""

CONTRACTED = " contraction"

DISTANCE = "distance from the SDE, floors"

ALL_EXPLODE = "every prediction explodes before the last layer, as no network does: see the priors, and the range"


@checked
@in_enough_precision
def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | Architecture | None = None,
) -> Check:
    """Check a fit: convergence, identification, calibration, agreement with the theory, and the truth if known.

    - calibrated: the one-step innovations in eight directions (`innovation_tests`), if every layer was observed. A
      misfit fails if it is significant and moves a parameter by more than `MOVE` posterior standard deviations (see
      `consequences`), or if it is larger than `EFFECT`; others are reported as notes. The false-alarm probability of
      each test is `LEVEL`, for all directions together. With latent layers, each network given all others
      (`left_out_transforms`).
    - architecture: other architectures and sizes by their evidence, see `alternatives`.
    - agrees with the theory: what the law omits, by its consequences; the range of the law; with latent layers, also
      networks after the last layer against the SDE.
    - converged: R-hat, effective sample sizes, divergences and BFMI; for an approximation, the Pareto k of its
      importance weights.
    - identified: the contraction of each posterior from its prior, or the contraction expected from the Fisher
      information if that is less; see `identification`. A parameter that is not identified is no defect of a fit. Left
      out if the layers do not obey the law.
    - true: each parameter against the truth, if known.

    No check of a solver's step is needed for latent layers: they are the layers of the networks, not solver steps.

    Arguments:
        post: the result of `fit` or of `approximate`.
        data: the data that were fitted, to be compared with those in the posterior, which are checked: the transitions
            that the fit used; of data in chunks (Dask) some of the networks, which a note says.
        architecture: the layer, for a custom type of layer, which the posterior does not store.

    Returns:
        The verdicts, each with value, threshold and advice; and the skipped tests.

    Raises:
        InputError: for data that were not fitted.
    """
    if "tokens" in post.children.get("observed_data", xr.DataTree()).data_vars:
        raise InputError("post: is a fit of observed tokens; si.meanfield.check takes it")
    post = with_chains(post)
    data = fitted_data(post, data)
    table = summarise(post)
    kind = _kind_of(post, data, architecture)
    verdicts, notes, assumed = layers_against_law(post, data, kind, table["sd"].to_dict())
    verdicts += _of_range(post, data, kind)
    notes += _of_kept(post)
    left_out = float(post.attrs.get("left_out", 0.0))
    if left_out > MANY_LEFT_OUT:
        notes.append(f"{left_out:.1%} of the transitions start outside the range of the law, and are left out")
    obeyed = all(verdict.passed for verdict in verdicts)
    approximate = "pareto_k" in post.attrs
    sampled = table.drop(index=[name for name in constants_of(post) if name in table.index])
    verdicts += _of_approximation(post) if approximate else _of_chains(sampled)
    if not approximate:
        notes += _rough(sampled)
    if obeyed:
        verdicts += _of_identification(post, kind)
    if not approximate:
        verdicts += _of_geometry(post)
    predictions = _of_predictions(post, data)
    if post.attrs.get("every_layer"):
        notes += [
            f"{verdict.name} {verdict.value:.2g}: {verdict.advice}" for verdict in predictions if not verdict.passed
        ]
    else:
        verdicts += predictions
    for name in identified_of(post):
        if np.isfinite(table.loc[name, "truth"]):
            row = table.loc[name]
            deviations = abs(row["mean"] - row["truth"]) / row["sd"]
            advice = "posterior sds away: the model does not fit"
            verdicts.append(at_most("true", f"{name} against truth", deviations, DEVIATIONS, advice))
    unidentified = [v.name.removesuffix(CONTRACTED) for v in verdicts if v.topic == "identified" and not v.passed]
    known = [name for name in identified_of(post) if name not in unidentified and name in table.index]
    return Check(
        tuple(verdicts),
        skipped=_skipped(post, kind),
        identified=tuple(with_precision(name, table) for name in known),
        unidentified=tuple(unidentified),
        notes=tuple(notes),
        assumed=tuple(assumed) if known else (),
    )


def _of_kept(post: xr.DataTree) -> list[str]:
    """A note on networks of data in chunks that were damaged, or are not in the posterior."""
    attrs, notes = post.attrs, []
    if attrs.get("kept_networks", 0) < attrs.get("networks", 0):
        notes.append(f"layers and predictions are checked on {attrs['kept_networks']} of {attrs['networks']} networks")
    if "damaged_networks" in attrs:
        notes.append(f"{attrs['damaged_networks']} damaged networks are left out")
    return notes


def with_precision(name: str, table: pd.DataFrame) -> str:
    """A parameter with its relative standard deviation in percent, such as "gamma ± 1 %"."""
    percent = f"{100 * table.loc[name, 'sd'] / abs(table.loc[name, 'mean']):.2g}"
    return f"{name} ± {float(percent):g} %"


def _kind_of(
    post: xr.DataTree,
    data: xr.Dataset,
    architecture: AbstractLayer | type[AbstractLayer] | Architecture | None,
) -> Architecture | None:
    """The kind of layer that was fitted; None for a custom layer that is not given."""
    if architecture is None:
        return architecture_in(post.attrs) if post.attrs.get("architecture") in ARCHITECTURES else None
    kind = architecture_of(data, architecture)
    if kind.name != post.attrs.get("architecture"):
        raise InputError(f"architecture: the fit is of {post.attrs.get('architecture')}, got {kind.name}")
    return kind


def _skipped(post: xr.DataTree, kind: Architecture | None) -> tuple[str, ...]:
    """The tests that cannot be made, with reasons."""
    skipped = []
    if not post.attrs.get("every_layer"):
        skipped.append("one-step innovations: layers are latent")
    elif "layers" not in post.children:
        skipped.append(
            "one-step innovations, other architectures and the range of the law: the program has no single layer, and "
            "its likelihood has no adjustment, without which intervals of narrow networks are too short"
        )
    elif kind is None:
        name = post.attrs.get("architecture")
        skipped.append(f"one-step innovations and the range of the law: give the layer, architecture={name}")
    elif not has_alternatives(post, kind):
        skipped.append("other architectures and sizes: they are tried for a named architecture, one layer for all")
    if "posterior_predictive" not in post.children:
        skipped.append("networks left out and distance from the SDE: there are no predictions")
    elif not count_predictions(post):
        skipped.append(
            "networks left out and distance from the SDE: no draw that is left has predictions; select by sel"
        )
    if "pareto_k" not in post.attrs and post["posterior"].sizes["chain"] == 1:
        skipped.append("agreement of chains: there is one, and R-hat compares its halves; run two chains or more")
    return tuple(skipped)


def with_chains(post: xr.DataTree) -> xr.DataTree:
    """A posterior with its axis of chains, also where one chain was selected, as by `post.isel(chain=0)`."""
    tree = xr.DataTree.from_dict({name: with_chain(group.to_dataset()) for name, group in post.children.items()})
    tree.attrs = dict(post.attrs)
    return tree


def sampler_verdicts(post: xr.DataTree, table: pd.DataFrame) -> tuple[list[Verdict], list[str]]:
    """Whether the sampler converged: verdicts and notes.

    Arguments:
        post: the result of a fit.
        table: rows of `summarise` of the sampled parameters.
    """
    return [*_of_chains(table), *_of_geometry(post)], _rough(table)


def _of_chains(table: pd.DataFrame) -> list[Verdict]:
    longer = "run longer: more warmup and more draws"
    return [
        at_most("converged", "R-hat", table["rhat"].max(skipna=False), RHAT, longer, strict=True),
        at_least("converged", "bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        at_least("converged", "tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
    ]


def _rough(table: pd.DataFrame) -> list[str]:
    """A note on Monte Carlo errors that are small and larger than usual."""
    rhat, ess = table["rhat"].to_numpy().max(), table[["ess_bulk", "ess_tail"]].to_numpy().min()
    if rhat < ROUGH_RHAT and ess >= ROUGH_ESS:
        return []
    return [f"R-hat {rhat:.3f} and the smallest ESS {ess:.0f}: means and intervals are rough; draw more for digits"]


def _of_geometry(post: xr.DataTree) -> list[Verdict]:
    """Symptoms of a posterior that is hard to explore, for example of weakly identified parameters."""
    statistics = post["sample_stats"].to_dataset()
    advice = "the posterior is hard to explore, where the data say little or contradict the law: raise the warmup"
    verdicts = [at_most("converged", "divergences", statistics["diverging"].mean(), DIVERGENT, advice)]
    if "energy" in statistics:
        smallest = float(np.min(array_stats.bfmi(statistics["energy"].values)))
        advice = "the sampler explores the posterior's energies too slowly: run longer"
        verdicts.append(at_least("converged", "BFMI", smallest, BFMI, advice))
    return verdicts


def _of_approximation(post: xr.DataTree) -> list[Verdict]:
    advice = "the posterior is not close to normal: use fit"
    return [at_most("converged", "Pareto k", post.attrs["pareto_k"], PARETO_K, advice)]


def _of_identification(post: xr.DataTree, kind: Architecture | None) -> list[Verdict]:
    if not has_prior(post):
        return []
    verdicts = []
    table = identification(post, architecture=kind)
    for name in table.index:
        advice = f"the data say little of {name}"
        if "networks" in table:
            times = float(table.loc[name, "networks"])
            advice += f"; to know it to 10 % takes {times:.2g} times as many" if times < MANY else "; nor would more"
            advice += " networks like these, or others: `sdeinfer design`"
        contraction = table.loc[name, ["contraction", "expected"] if "expected" in table else ["contraction"]].min()
        verdicts.append(at_least("identified", f"{name}{CONTRACTED}", contraction, CONTRACTION, advice))
    return verdicts


def _of_range(post: xr.DataTree, data: xr.Dataset, kind: Architecture | None) -> list[Verdict]:
    if kind is None or not kind.coordinates.temperatures:
        return []
    used = used_of(data)
    layers = post["layers"].to_dataset()
    tau0 = np.min([layers[name].values for name in kind.coordinates.temperatures], axis=0)
    spread = logit_scale(data) / tau0[:, None]
    smaller = "the law expands the softmax: lower largest_logit, use smaller tokens or wider networks"
    verdicts = [
        at_most(
            THEORY, "logit spread, mean", mean_spread(spread[used]), SPREAD[post.attrs.get("law", "limit")], smaller
        )
    ]
    outside = (
        "nearly all transitions start outside the range of the law: tokens are too large for τ0, networks too narrow, "
        "or the temperature is not τ0 √(n n_k)"
    )
    if "out_of_range" in post.attrs:
        return [at_least(THEORY, IN_RANGE, 0.0, LEAST_USED, str(post.attrs["out_of_range"])), *verdicts]
    share, exact = float(used.mean()), None
    if "used_transitions" in post.attrs:  # of all networks, of which the data are some
        share = 1 - float(post.attrs["left_out"])
    if share < LEAST_USED and post.attrs.get("model") == "full_path":
        exact = excluded_layers(post, data, kind, spread)
    if exact is None:
        return [at_least(THEORY, IN_RANGE, share, FEWEST_USED, outside), *verdicts]
    z = float(np.max(np.abs(exact["z"])))
    advice = f"{outside}, and they are not those of a shaped {kind.name} with these parameters"
    return [*verdicts, at_most("calibrated", "layers out of range, sds", z, EXCLUDED, advice)]


def _of_predictions(post: xr.DataTree, data: xr.Dataset) -> list[Verdict]:
    if not count_predictions(post):
        return []
    if all_exploded(post):
        return [at_most(THEORY, DISTANCE, np.inf, FLOORS, ALL_EXPLODE)]
    verdicts = []
    if data.sizes["network"] >= FEWEST:
        each = left_out_p_values(post)
        advice = f"{each.idxmin()} after the last layer varies between networks otherwise than the SDE predicts"
        p = min(1.0, each.min() * len(each))
        verdicts.append(at_least("calibrated", "networks left out, p", p, LEVEL, advice))
    distances = distance_from_theory(post)
    ratio = (distances["wasserstein"] / distances["floor"]).fillna(0.0)  # 0/0 where all are equal
    far = distances.loc[ratio.idxmax()]
    advice = (
        f"{ratio.idxmax()} after the last layer is {far['wasserstein']:.2g} sds from the SDE, where samples of one law "
        f"would be {far['floor']:.2g}: another architecture, or networks too narrow for the limit"
    )
    return [*verdicts, at_most(THEORY, DISTANCE, ratio.max(), FLOORS, advice)]
