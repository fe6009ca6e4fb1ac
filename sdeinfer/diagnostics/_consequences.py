"""Consequences of misfits and of priors: how far each moves the parameters, and the verdicts on them.

If the innovations' means are shifted by ε a and their relative variances by ε c, the score is shifted by ε A, with A =
Σ (a μ′/σ + c (log σ²)′/2), and the posterior's mode by ε G⁻¹ A, with the curvature G of the log posterior. The size ε
of a misfit in a direction of `innovation_tests` is estimated by one step of the score, together with the parameters.
The sizes of what a law omits are known: the next order of the softmax up to a factor of about 1, and the finite width.
"""

import math

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._innovations import DIRECTIONS, OMISSIONS, ScoreSums, inverse_of, score_sums
from sdeinfer.diagnostics._posterior import PRIOR_SD, FittedPosterior, has_prior
from sdeinfer.diagnostics._thresholds import CONFLICT, EFFECT, LEVEL, MOVE, SCATTER_RATIO
from sdeinfer.diagnostics._verdict import Verdict, at_most
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._program import PATH

SCATTER = "scatter of networks"


def consequences(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: AbstractLayer | None = None
) -> pd.DataFrame:
    """Moves of the parameters by each way in which the layers may leave the law, in posterior standard deviations.

    The moves are in the coordinates on the real line, such as logit γ and log τ0, at the posterior mean. If networks
    have different layers, a move is that of all of them together.

    Arguments:
        post: the result of `fit` to networks observed at every layer.
        data: the data that were fitted, to be compared with those in the posterior, as in `check`.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row per direction of `innovation_tests`, with its columns `effect`, `z` and `p`, and the move of each
        identified parameter in a column of its name. Then a row for each part that the law omits, without `z` and `p`;
        and the row "scatter of networks", whose columns are the ratios of the standard deviations by the scatter of
        the networks' scores to those of the posterior: above 1 where layers of a network are not independent.
    """
    posterior = FittedPosterior.of(post, data, architecture)
    return consequences_of(score_sums(posterior), posterior)


def consequences_of(sums: ScoreSums, posterior: FittedPosterior) -> pd.DataFrame:
    """The table of `consequences`."""
    table, fixed = sums.tests, posterior.fixed
    known = posterior.known_kind.coordinates.sampled
    names = [name for name, parameter in known.items() if parameter.identified and name not in fixed]
    if not names:
        return table
    free = np.array([name not in fixed for name in known])
    prior = np.diag(_precision_besides(sums.information, posterior))
    block = np.ix_(free, free)

    def covariance(information: np.ndarray) -> np.ndarray:
        """The inverse of the curvature of the log posterior, among the free parameters."""
        inverse = np.zeros_like(information)
        inverse[block] = inverse_of((information + prior)[block])
        return inverse

    inverse = covariance(sums.information)
    by_scores, by_networks = (
        np.sqrt(np.maximum(np.diagonal(inverse @ scatter @ inverse), 0.0))
        for scatter in (sums.scatter, sums.of_networks)
    )
    sd = np.array([posterior.sds[name] for name in known])
    sd = np.where(np.isnan(sd), by_scores, sd)
    sd = np.where(free & (sd > 0), sd, np.inf)
    tested = (sums.squares > 0) & (sums.sizes > 0)
    size = sums.corrected[tested] / sums.sizes[tested]
    # The mode of a law with the omitted part follows from that law's curvature, whose correlations differ.
    omitted = [shift @ covariance(information) for shift, information in zip(sums.omitted, sums.completed, strict=True)]
    moves = [*(size[:, None] * (sums.along[tested] @ inverse)), *omitted, by_networks]
    rows = pd.DataFrame(np.array(moves) / sd, index=[*table.index, *OMISSIONS, SCATTER], columns=list(known))
    present = [
        *table.index,
        *(name for name, shift in zip(OMISSIONS, sums.omitted, strict=True) if shift.any()),
        SCATTER,
    ]
    return table.reindex(present).join(rows.loc[present, names]).rename_axis("direction")


def _precision_besides(information: np.ndarray, posterior: FittedPosterior) -> np.ndarray:
    """Precision of each coordinate without the networks: that of the prior, or more if a program observes more."""
    known = posterior.known_kind.coordinates.sampled
    spread = np.array([posterior.priors[name][1] for name in known])
    prior = np.where(spread > 0, spread, 1.0) ** -2  # that of a fixed coordinate is not used
    groups = posterior.tree.children
    if not {*(groups["log_likelihood"].data_vars if "log_likelihood" in groups else ())} - {PATH}:
        return prior
    alone = 1 / np.maximum(np.diagonal(inverse_of(information + np.diag(prior))), np.finfo(float).tiny)
    sd = np.array([posterior.sds[name] for name in known])
    return prior + np.maximum(np.nan_to_num(1 / np.where(sd > 0, sd, np.inf) ** 2 - alone), 0.0)


def of_conflict(sums: ScoreSums, posterior: FittedPosterior) -> list[Verdict]:
    """A failed verdict on the tightest prior that contradicts the data; none if no prior does.

    By the networks without its own prior a coordinate moves by v s, with its score s and its variance v given the
    networks and the other priors. A prior of mean m and standard deviation d contradicts them where u + v s is far from
    m by (v + d²)^{1/2}, and it matters where v s is large beside the posterior standard deviation. Priors as wide as
    the defaults are left out: where they matter, the data identify so little that one step does not find the mode.
    """
    if not has_prior(posterior.tree) or not posterior.one_layer:
        return []
    known, conflicts = posterior.known_kind.coordinates.sampled, []
    free = [name for name in known if name not in posterior.fixed]
    places = [list(known).index(name) for name in free]
    precision = np.array([posterior.priors[name][1] for name in free]) ** -2
    draws = posterior.tree["posterior"].to_dataset()
    for name in posterior.identified:
        place, (mean, sd) = free.index(name), posterior.priors[name]
        if sd > PRIOR_SD / 2:
            continue
        other_priors = np.diag(np.where(np.arange(len(free)) == place, 1e-9, precision))
        variance = inverse_of(sums.information[np.ix_(places, places)] + other_priors)[place, place]
        move = variance * sums.score[places[place]]
        centre = float(np.mean(known[name].to_real(draws[name].values)))
        distance = abs(centre + move - mean) / np.sqrt(variance + sd**2)
        moved = abs(move) / posterior.sds[name]
        if distance > CONFLICT and moved > MOVE:
            conflicts.append((sd, moved, name, mean, centre, "up" if move > 0 else "down"))
    if not conflicts:
        return []
    _, moved, name, *ends, way = min(conflicts)  # a tight prior of one moves the others too
    prior, fitted = (float(known[name].from_real(np.float64(x))) for x in ends)
    advice = (
        f"the prior of {name}, about {prior:.3g}, contradicts the data, which pull it {way} from {fitted:.3g}: widen it"
    )
    return [at_most("calibrated", "prior against data, posterior sds", moved, MOVE, advice)]


def of_large_misfits(table: pd.DataFrame, kind: AbstractLayer) -> list[Verdict]:
    """Verdicts on what the limit's law leaves out, and on layers that are clearly of something else."""
    verdicts = []
    if "finite width" in table.index:
        largest, moved = _largest(table.loc[["finite width"]])
        advice = (
            f"the limit's law leaves out what moves {moved} by {largest:.2g} posterior sds: fit by law='finite-width'"
        )
        verdicts.append(at_most("agrees with the theory", "finite width, posterior sds", largest, MOVE, advice))
    p, large = table["p"].to_dict(), _seen(table)["effect"].abs().to_dict()
    worst = min([name for name in large if large[name] > EFFECT], key=lambda name: p[name], default="")
    cause = f"not layers of a shaped {kind.name}, by {worst}: {DIRECTIONS[worst]}" if worst else ""
    largest = large[worst] if worst else max(large.values(), default=0.0)
    return [*verdicts, at_most("calibrated", "misfit of the layers", largest, EFFECT, cause)]


def of_small_misfits(table: pd.DataFrame, law: str, networks: int) -> tuple[list[Verdict], list[str]]:
    """Verdicts on misfits that move a parameter, and on the scatter of networks; notes on those that do not matter."""
    seen, notes, cause = _seen(table), [], ""
    largest, moved = _largest(seen)
    if moved:
        worst = str(seen[moved].abs().idxmax())
        effect = abs(float(table["effect"].to_dict()[worst]))
        cause = f"{worst}: a misfit of {effect:.1%} of an increment's sd moves {moved} by {largest:.2g} posterior sds; "
        if largest <= MOVE:
            notes.append(cause + "it is seen and does not matter")
        remedy = "fit by law='finite-width'" if law == "limit" else "check the architecture and its sizes"
        cause += f"{DIRECTIONS[worst]}: {remedy}"
    verdicts = [at_most("calibrated", "move by the misfit, posterior sds", largest, MOVE, cause)]
    if SCATTER in table.index:
        largest, moved = _largest(table.loc[[SCATTER]])
        advice = (
            f"the networks scatter more than the posterior of {moved} by this factor: layers of a network are not "
            "independent, and fewer can be fitted, as by `data.isel(layer=slice(2))`; or networks have different "
            "parameters, as by `models.hierarchical`"
        )
        bound = SCATTER_RATIO * (1 + 2 / math.sqrt(2 * networks))
        verdicts.append(at_most("calibrated", "scatter of networks", largest, bound, advice))
    return verdicts, notes


def _seen(table: pd.DataFrame) -> pd.DataFrame:
    """The directions with a significant misfit."""
    tests = table.drop(index=[*OMISSIONS, SCATTER], errors="ignore")
    return tests.loc[[name for name, p in tests["p"].to_dict().items() if p * len(tests) < LEVEL]]


def _largest(table: pd.DataFrame) -> tuple[float, str]:
    """The largest move, and the parameter that it moves; 0 and no name if there is none."""
    of_each = table.drop(columns=["effect", "z", "p"]).abs().max()
    if of_each.isna().all():
        return 0.0, ""
    return float(of_each.max()), str(of_each.idxmax())
