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
from jaxtyping import Float

from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._innovations import DIRECTIONS, OMISSIONS, inverse_of
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import has_prior, identified_of
from sdeinfer.diagnostics._verdict import Check, at_most
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._program import PATH

SCATTER = "scatter of networks"


def innovation_tests(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: AbstractLayer | None = None
) -> pd.DataFrame:
    """Test the innovations of every layer at the posterior mean, in each direction.

    Arguments:
        post: the result of `fit` to networks observed at every layer.
        data: the data that were fitted, to be compared with those in the posterior, as in `check`.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row per direction, with columns `effect`, the root mean square of the misfit over layers, in standard
        deviations of a layer's increments, without the part that the parameters absorb; `z`, its deviation from zero in
        standard errors; and the two-sided `p`.
    """
    return Residuals.of(post, data, architecture).sums.tests


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
    return moves_of(Residuals.of(post, data, architecture))


def moves_of(residuals: Residuals) -> pd.DataFrame:
    """The table of `consequences`."""
    sums, table = residuals.sums, residuals.sums.tests
    names = [name for name in residuals.known_kind.coordinates.identified if name not in residuals.fixed]
    if not names:
        return table
    precision = _precision_besides(residuals)
    inverse = residuals.covariance(sums.information, precision)
    by_scores, by_networks = (
        np.sqrt(np.maximum(np.diagonal(inverse @ scatter @ inverse), 0.0))
        for scatter in (sums.scatter, sums.of_networks)
    )
    sd = np.where(np.isnan(residuals.sds), by_scores, residuals.sds)
    sd = np.where(residuals.free & (sd > 0), sd, np.inf)
    size = sums.corrected[sums.tested] / sums.sizes[sums.tested]
    moves = dict(zip(table.index, size[:, None] * (sums.along[sums.tested] @ inverse), strict=True))
    # The mode of a law with the omitted part follows from that law's curvature, whose correlations differ.
    for name, shift, information in zip(OMISSIONS, sums.omitted, sums.completed, strict=True):
        if shift.any():
            moves[name] = shift @ residuals.covariance(information, precision)
    moves[SCATTER] = by_networks
    rows = pd.DataFrame(np.array([*moves.values()]) / sd, index=[*moves], columns=list(residuals.coordinates))
    return table.reindex(rows.index).join(rows[names]).rename_axis("direction")


def _precision_besides(residuals: Residuals) -> Float[np.ndarray, " coordinates"]:
    """Precision without the networks: that of the priors, or more if a program observes more."""
    likelihoods = residuals.tree.children.get("log_likelihood", xr.DataTree()).data_vars
    if not {*likelihoods} - {PATH}:
        return residuals.precision
    inverse = inverse_of(residuals.sums.information + np.diag(residuals.precision))
    alone = 1 / np.maximum(np.diagonal(inverse), np.finfo(float).tiny)
    sd = np.where(residuals.sds > 0, residuals.sds, np.inf)
    return residuals.precision + np.maximum(np.nan_to_num(1 / sd**2 - alone), 0.0)


def significant_moves(residuals: Residuals) -> pd.DataFrame:
    """The rows of significant misfits."""
    tests = moves_of(residuals).drop(index=[*OMISSIONS, SCATTER], errors="ignore")
    return tests.loc[tests["p"] * len(tests) < bounds.LEVEL]


def check_conflict(residuals: Residuals) -> Check:
    """A failed verdict on the tightest prior that contradicts the data; none if no prior does.

    Without its own prior a coordinate moves by v s: s is its score at the mean, and v its variance given the networks
    and the other priors. A prior of mean m and standard deviation d contradicts them where u + v s is far from
    m by (v + d²)^{1/2}, and it matters where v s is large beside the posterior standard deviation. Priors as wide as
    the defaults are left out: where they matter, the data identify so little that one step does not find the mode.
    """
    if not has_prior(residuals.tree) or not residuals.one_layer:
        return Check()
    sums, identified, conflicts = residuals.sums, identified_of(residuals.tree), []
    for place, (name, parameter) in enumerate(residuals.coordinates.items()):
        mean, sd = residuals.priors[name]
        if name not in identified or sd > bounds.TESTED_PRIOR_SD:
            continue
        precision = np.where(np.arange(len(residuals.free)) == place, bounds.FLAT_PRECISION, residuals.precision)
        variance = residuals.covariance(sums.information, precision)[place, place]
        move = variance * sums.score[place]
        centre = float(np.mean(parameter.to_real(residuals.draws[name].values)))
        distance = abs(centre + move - mean) / np.sqrt(variance + sd**2)
        moved = abs(move) / residuals.sds[place]
        if distance > bounds.PRIOR_CONFLICT and moved > bounds.LARGEST_MOVE:
            prior, fitted = (float(parameter.from_real(np.float64(x))) for x in (mean, centre))
            advice = (
                f"the prior of {name}, about {prior:.3g}, contradicts the data, which pull it "
                f"{'up' if move > 0 else 'down'} from {fitted:.3g}: widen it"
            )
            conflicts.append((sd, moved, advice))
    if not conflicts:
        return Check()
    _, moved, advice = min(conflicts, key=lambda conflict: conflict[0])  # a tight prior of one moves the others too
    return Check((at_most("calibrated", "prior against data, posterior sds", moved, bounds.LARGEST_MOVE, advice),))


def check_finite_width(residuals: Residuals) -> Check:
    """The verdict on what the limit's law leaves out."""
    rows = moves_of(residuals).filter(["finite width"], axis="index")
    if rows.empty:
        return Check()
    largest, moved = _largest(rows)
    advice = f"the limit's law leaves out what moves {moved} by {largest:.2g} posterior sds: fit by law='finite-width'"
    return Check(
        (at_most("agrees with the theory", "finite width, posterior sds", largest, bounds.LARGEST_MOVE, advice),)
    )


def check_misfit(residuals: Residuals) -> Check:
    """The verdict on layers that are clearly of something else, by the most significant of the large effects."""
    rows = significant_moves(residuals)
    effects, (largest, worst, move) = rows["effect"].abs(), _largest_move(rows)
    notes = (f"{move}; it is seen and does not matter",) if worst and largest <= bounds.LARGEST_MOVE else ()
    large = rows.loc[effects > bounds.MISFIT_EFFECT]
    effect, advice = max(effects, default=0.0), ""
    if len(large):
        name = str(large["p"].idxmin())
        effect = effects[name]
        advice = f"not layers of a shaped {residuals.known_kind.name}, by {name}: {DIRECTIONS[name]}"
    verdict = at_most("calibrated", "misfit of the layers", effect, bounds.MISFIT_EFFECT, advice)
    return Check((verdict,), notes=notes)


def check_move(residuals: Residuals) -> Check:
    """The verdict on the largest move of a parameter by a significant misfit."""
    largest, worst, advice = _largest_move(significant_moves(residuals))
    if worst:
        by_limit = residuals.law == "limit"
        remedy = "fit by law='finite-width'" if by_limit else "check the architecture and its sizes"
        advice += f"; {DIRECTIONS[worst]}: {remedy}"
    return Check((at_most("calibrated", "move by the misfit, posterior sds", largest, bounds.LARGEST_MOVE, advice),))


def check_scatter(residuals: Residuals) -> Check:
    """The verdict on the scatter of the networks' scores."""
    rows = moves_of(residuals).filter([SCATTER], axis="index")
    if rows.empty:
        return Check()
    largest, moved = _largest(rows)
    advice = (
        f"the networks scatter more than the posterior of {moved} by this factor: layers of a network are not "
        "independent, and fewer can be fitted, as by `data.isel(layer=slice(2))`; or networks have different "
        "parameters, as by `models.hierarchical`"
    )
    # Two standard errors of a standard deviation by so many networks are allowed.
    bound = bounds.SD_RATIO * (1 + 2 / math.sqrt(2 * residuals.data.sizes["network"]))
    return Check((at_most("calibrated", "scatter of networks", largest, bound, advice),))


def _largest_move(rows: pd.DataFrame) -> tuple[float, str, str]:
    """The largest move by a misfit, its direction, and both in words; without words if there is none."""
    largest, moved = _largest(rows)
    if not moved:
        return largest, "", ""
    worst = str(rows[moved].abs().idxmax())
    of_sd = f"{worst}: a misfit of {abs(rows.loc[worst, 'effect']):.1%} of an increment's sd"
    return largest, worst, f"{of_sd} moves {moved} by {largest:.2g} posterior sds"


def _largest(rows: pd.DataFrame) -> tuple[float, str]:
    """The largest move, and the parameter that it moves; 0 and no name if there is none."""
    of_parameter = rows.drop(columns=["effect", "z", "p"]).abs().max()
    if of_parameter.isna().all():
        return 0.0, ""
    return float(of_parameter.max()), str(of_parameter.idxmax())
