"""Priors that contradict the data: a tight prior in the wrong place, which other tests would take for a misfit."""

import numpy as np

from sdeinfer.diagnostics._innovations import Sums, inverse_of
from sdeinfer.diagnostics._posterior import PRIOR_SD, Posterior, has_prior
from sdeinfer.diagnostics._thresholds import CONFLICT, MOVE
from sdeinfer.diagnostics._verdict import Verdict, at_most


def of_conflict(sums: Sums, posterior: Posterior) -> list[Verdict]:
    """A failed verdict on the tightest prior that contradicts the data; none if no prior does.

    By the networks without its own prior a coordinate moves by v s, with its score s and its variance v given the
    networks and the other priors. A prior of mean m and standard deviation d contradicts them where u + v s is far from
    m by (v + d²)^{1/2}, and it matters where v s is large beside the posterior standard deviation. Priors as wide as
    the defaults are left out: where they matter, the data say so little that one step does not find the mode.
    """
    if not has_prior(posterior.tree) or not posterior.one_layer:
        return []
    known, found = posterior.known_kind.coordinates.sampled, []
    free = [name for name in known if name not in posterior.fixed]
    places = [list(known).index(name) for name in free]
    precision = np.array([posterior.priors[name][1] for name in free]) ** -2
    draws = posterior.tree["posterior"].to_dataset()
    for name in posterior.identified:
        place, (mean, sd) = free.index(name), posterior.priors[name]
        if sd > PRIOR_SD / 2:
            continue
        others = np.diag(np.where(np.arange(len(free)) == place, 1e-9, precision))
        variance = inverse_of(sums.information[np.ix_(places, places)] + others)[place, place]
        move = variance * sums.score[places[place]]
        at = float(np.mean(known[name].to_real(draws[name].values)))
        distance = abs(at + move - mean) / np.sqrt(variance + sd**2)
        moved = abs(move) / posterior.sds[name]
        if distance > CONFLICT and moved > MOVE:
            found.append((sd, moved, name, mean, at, "up" if move > 0 else "down"))
    if not found:
        return []
    _, moved, name, *ends, way = min(found)  # a tight prior of one moves the others too
    about, here = (float(known[name].from_real(np.float64(x))) for x in ends)
    advice = (
        f"the prior of {name}, about {about:.3g}, contradicts the data, which pull it {way} from {here:.3g}: widen it"
    )
    return [at_most("calibrated", "prior against data, posterior sds", moved, MOVE, advice)]
