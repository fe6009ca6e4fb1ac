"""Distance between networks of finite width and the SDE, and its rate of convergence in the width."""

import math
from collections.abc import Sequence

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import ProgressBar, phase, with_progress_line
from sdeinfer.covariance import singular, validate_covariance
from sdeinfer.diagnostics._rate import fit_rate, jackknife
from sdeinfer.layers import AbstractLayer, check_parameters
from sdeinfer.networks import check_chain_width, sample_networks
from sdeinfer.solve import simulate

BATCHES = 50
"""Number of independent parts of the samples, for the error bars."""

EXPLODED = 1e-3
"""Largest acceptable fraction of exploded paths of the SDE; they are left out."""

POINTS = 512
"""Number of quantiles, and of evenly spaced values, at which distribution functions are compared."""

ROUNDING = 1000
"""Bound on the standard deviation of a quantity, in units of rounding, below which it counts as constant."""


@checked
@with_progress_line
def agreement(
    layer: AbstractLayer,
    V0: Float[Array, "m m"],
    *,
    time: float,
    widths: Sequence[int],
    networks: int | Sequence[int],
    paths: int | None = None,
    step: float = 0.01,
    progress: bool = False,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Measure the distance between the law of V_T in networks of several widths and in the SDE, and its rate.

    For every correlation ρ_αβ (α < β) and every log-eigenvalue of V_T, with distribution function F_n in networks of
    width n and depth Tn, and F and standard deviation s in the SDE,

        distance   W(n) = ∫ |F_n − F| dx / s                the Wasserstein-1 distance
        squared    D²(n) = 2√π ∫ (F_n − F)² dx / s          the squared Cramér distance, half the energy distance

    For normal laws that differ by a small shift of δ standard deviations, W = |δ| and D² = δ².

    The estimate of W is biased: samples of equal laws have W equal to the `floor` √(2/π) ∫ e(x) dx/s, with e the
    standard error of F̂_n(x) − F̂(x), since E|Z| = √(2/π) e for normal Z; it is 1.4 √(1/networks + 1/paths) for normal
    laws. The rate is therefore fitted to D², which has an unbiased estimate. Split the samples into B independent
    parts, and let G_b be the difference of their distribution functions in part b. Then

        D̂² = 2√π/s · (|Σ_b G_b|² − Σ_b |G_b|²) / (B(B − 1)),       |G|² = ∫ G² dx,

    pairs different parts only, so E D̂² = D²; it may be negative. The rate r is fitted to D² = C² n^(−2r) by weighted
    least squares over all widths; noisy widths enter with large errors but without bias. Error bars are from a
    jackknife over the parts, which accounts for the SDE paths shared by all widths; for pure noise they are √2 too
    large. Since the next order in 1/n is unknown, the fit assumes a relative model error `CURVATURE`/n of D², and
    `rate_error` includes the change of the rate by a factor 1 + `CURVATURE`/n.

    **Expected rates.** The chain of networks is an Euler scheme of the SDE with steps 1/n, up to terms of relative
    order 1/n in the drift and the variance of a step, with one exception: the drift of the ReLU is multiplied by its He
    constant c = 2/(s₊² + s₋²) = 1 − (c₊ + c₋)/√n + O(1/n). So r = 1 without ReLU or with c₊ + c₋ = 0. Otherwise the
    laws differ by A (c₊ + c₋)/√n + B/n, whose terms may cancel at moderate widths, and r approaches ½ only at large
    widths: clearly for correlations, which the ReLU changes, and hardly for eigenvalues. The error of the solver is of
    order `step`², of the size of 1/n² at the width 1/`step`.

    Arguments:
        layer: the architecture, with its parameters.
        V0: nonsingular covariance of the initial tokens, shape (m, m).
        time: T, depth-time (dimensionless). Networks have round(Tn) layers; the SDE is solved to round(Tn)/n. time ×
            width should be whole, so that the rounding of T does not affect the rate.
        widths: n, increasing; each at least 2m (per head, for attention without an output projection).
        networks: number of networks, or one number per width; at least `BATCHES`. A network costs n² T.
        paths: number of paths of the SDE; if None, the largest number of networks.
        step: longest step of the solver.
        progress: show a progress bar.
        key: PRNG key.

    Returns:
        A Dataset over `quantity` and `width`. Quantities are rho[α,β], log_eigenvalue[i] (smallest first), and the
        averages correlations, log_eigenvalues and overall, for which W, floor and D² are averaged over quantities.

        - distance, distance_error, floor: in standard deviations; squared, squared_error: their squares. See above.
        - rate, rate_error, constant: r and C over `quantity`; NaN for a single width, or if no D² exceeds `SIGNAL`
          times its error.
        - networks, depth and time over `width`.

        Correlations so close to ±1 that their variation is rounding are NaN and left out of the averages. Attributes:
        `paths`, `exploded` (number of exploded paths, which are left out), `architecture` and `truth_…`.

    Raises:
        InputError: for a V0 that is singular or not a covariance, for sizes that are too small, if networks overflow,
            if more than `EXPLODED` of the paths explode, or if rounding makes V_T singular.
    """
    start = validate_covariance(V0)
    layer = check_parameters(layer)
    if singular(start[None])[0]:
        raise InputError("V0: singular, so that there are no log-eigenvalues: leave out tokens that depend on others")
    widths, counts, depths = _sizes(layer, len(start), time, widths, networks)
    paths = max(counts) if paths is None else paths
    if paths < BATCHES:
        raise InputError(f"paths: at least {BATCHES} are needed, got {paths}")
    times = [depth / width for depth, width in zip(depths, widths, strict=True)]
    key_networks, key_paths = jr.split(key)
    phase("simulating the SDE")
    # The SDE is cheaper than the networks, so its errors should come first.
    limits, exploded = {}, 0
    for number, T in enumerate(sorted(set(times))):
        limits[T], lost = _paths(layer, start, T, paths=paths, step=step, key=jr.fold_in(key_paths, number))
        exploded += lost

    sampled, attributes = [], {}
    work = [width * depth * count for width, depth, count in zip(widths, depths, counts, strict=True)]
    phase("sampling networks")
    with ProgressBar(total=sum(work), desc="agreement", show=progress, unit_scale=True) as bar:
        for width, depth, count, cost in zip(widths, depths, counts, work, strict=True):
            key_width = jr.fold_in(key_networks, width)
            V, attributes = _networks(layer, start, width=width, depth=depth, networks=count, key=key_width)
            sampled.append(quantities(V, f"networks of width {width}"))
            bar.update(cost)

    found: dict[int, dict[str, np.ndarray]] = {}
    for T in limits:
        same = [i for i, t in enumerate(times) if t == T]
        found |= zip(same, _compare(limits[T], [sampled[i] for i in same], start.dtype), strict=True)
    names, measured = _with_groups(
        len(start), {name: np.stack([found[i][name] for i in range(len(widths))], axis=1) for name in found[0]}
    )
    of_widths = {"networks": counts, "depth": depths, "time": times}
    table = _table(names, np.asarray(widths), measured)
    table = table.assign_coords({name: ("width", each) for name, each in of_widths.items()})
    return table.assign_attrs(attributes | {"step": step, "paths": paths, "exploded": exploded})


def quantities(V: Float[np.ndarray, "samples m m"], where: str) -> Float[np.ndarray, "samples quantities"]:
    """Correlations ρ_αβ, α < β row by row, and log-eigenvalues, smallest first.

    Arguments:
        V: covariances.
        where: origin of V, for the error message.

    Raises:
        InputError: for a V that is singular up to rounding.
    """
    rows, columns = np.triu_indices(V.shape[-1], k=1)
    norms = np.sqrt(np.diagonal(V, axis1=-2, axis2=-1).astype(np.float64))
    rho = V[:, rows, columns] / (norms[:, rows] * norms[:, columns])
    eigenvalues = np.linalg.eigvalsh(V.astype(np.float64))
    flat = eigenvalues[:, 0] <= np.finfo(V.dtype).eps * V.shape[-1] * eigenvalues[:, -1]
    if flat.any():
        raise InputError(
            f"time: in {flat.sum()} of {len(V)} {where} V is singular up to the rounding of {V.dtype}; use a shorter "
            "time, or double precision"
        )
    return np.concatenate([rho, np.log(eigenvalues)], axis=1)


def _sizes(
    layer: AbstractLayer, tokens: int, time: float, widths: Sequence[int], networks: int | Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Check the sizes; return lists of widths, numbers of networks and depths."""
    if not (time > 0 and math.isfinite(time)):
        raise InputError(f"time: must be positive and finite, got {time}")
    each = np.asarray(widths)
    if each.ndim != 1 or each.size == 0 or each.dtype.kind not in "iu" or (np.diff(each) <= 0).any():
        raise InputError(f"widths: increasing whole numbers are needed, got {widths}")
    check_chain_width(layer, tokens=tokens, width=int(each[0]))
    counts = np.asarray(networks)
    if counts.dtype.kind not in "iu" or counts.shape not in ((), each.shape):
        raise InputError(f"networks: one whole number, or one for each of {each.size} widths, is needed")
    if counts.min() < BATCHES:
        raise InputError(f"networks: at least {BATCHES} are needed for error bars, got {counts.min()}")
    depths = [round(time * n) for n in each.tolist()]
    if depths[0] < 1:
        raise InputError(f"time: {time:g} is no more than half a layer of width {each[0]}")
    return each.tolist(), np.broadcast_to(counts, each.shape).tolist(), depths


def _networks(layer, V0, *, width: int, depth: int, networks: int, key) -> tuple[np.ndarray, dict]:
    """V after the last layer, and the attributes of the sampled Dataset."""
    try:
        data = sample_networks(
            layer, V0, width=width, depth=depth, networks=networks, observe_every=depth, method="chain", key=key
        )
    except InputError as error:
        raise InputError(f"width {width}: {error}") from error
    return data["covariance"].values[:, -1], dict(data.attrs)


def _paths(layer, V0, time: float, *, paths: int, step: float, key) -> tuple[np.ndarray, int]:
    """Quantities of the SDE's paths, and the number of exploded paths, which are left out."""
    V = np.asarray(simulate(layer, V0, [time], paths=paths, step=step, key=key))[:, 0]
    finite = np.isfinite(V).all(axis=(1, 2))
    lost = int(np.count_nonzero(~finite))
    if lost > EXPLODED * paths:
        raise InputError(
            f"time: {lost} of the SDE's {paths} paths explode before {time:g}, and at most {EXPLODED:g} of them may; "
            "use a shorter time or smaller tokens"
        )
    return quantities(V[finite], "paths of the SDE"), lost


def _compare(limit: np.ndarray, sampled: list[np.ndarray], dtype: np.dtype) -> list[dict[str, np.ndarray]]:
    """All measures of each quantity, for each sample of networks; jackknife replicates have a last axis of parts."""
    compared = [[] for _ in sampled]
    for q in range(limit.shape[1]):
        paths, networks = limit[:, q], [x[:, q] for x in sampled]
        scale = paths.std()
        if scale <= ROUNDING * np.finfo(dtype).eps * np.abs(paths).max():
            scale = np.nan
        # Quantiles resolve the bulk, even spacing the tails; the distribution functions agree outside the range.
        ends = min(x.min() for x in (paths, *networks)), max(x.max() for x in (paths, *networks))
        bulk = np.quantile(paths, (np.arange(POINTS) + 0.5) / POINTS)
        x = np.union1d(bulk, np.linspace(*ends, POINTS))
        weights = np.zeros(len(x))
        weights[:-1] += np.diff(x) / (2 * scale)
        weights[1:] += np.diff(x) / (2 * scale)
        F = _distribution(paths, x)
        for measured, each in zip(compared, networks, strict=True):
            measured.append(_distances(_distribution(each, x) - F, weights))
    return [{name: np.stack([one[name] for one in measured]) for name in measured[0]} for measured in compared]


def _distribution(samples: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Empirical distribution functions of `BATCHES` parts, shape (parts, points)."""
    parts = np.array_split(np.searchsorted(x, samples), BATCHES)
    return np.stack([np.cumsum(np.bincount(part, minlength=len(x)))[: len(x)] / len(part) for part in parts])


def _distances(G: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """W, its floor and D̂² from differences of distribution functions, of shape (parts, points).

    `distance_without` and `squared_without` are W and D̂² without each of the parts, for the jackknife.
    """
    parts = len(G)
    mean = G.mean(axis=0)
    without = (parts * mean - G) / (parts - 1)
    gram = 2 * math.sqrt(math.pi) * (G * weights) @ G.T
    own = np.diagonal(gram)
    pairs = gram.sum() - own.sum()
    return {
        "distance": np.asarray(np.abs(mean) @ weights),
        "distance_without": np.abs(without) @ weights,
        "floor": np.asarray(math.sqrt(2 / math.pi / parts) * G.std(axis=0, ddof=1) @ weights),
        "squared": np.asarray(pairs / (parts * (parts - 1))),
        "squared_without": (pairs - 2 * (gram.sum(axis=1) - own)) / ((parts - 1) * (parts - 2)),
    }


def _with_groups(tokens: int, measured: dict[str, np.ndarray]) -> tuple[list[str], dict[str, np.ndarray]]:
    """Names of all quantities, and the measures with the averages over groups of quantities appended."""
    rho = [f"rho[{a},{b}]" for a in range(tokens) for b in range(a + 1, tokens)]
    log_eigenvalue = [f"log_eigenvalue[{i}]" for i in range(tokens)]
    groups = {
        "correlations": np.arange(len(rho)),
        "log_eigenvalues": len(rho) + np.arange(tokens),
        "overall": np.arange(len(rho) + tokens),
    }
    groups = {name: members for name, members in groups.items() if len(members)}

    def averages(values):
        # A quantity may be NaN at some widths only, since T differs; average those that are finite at all widths.
        known = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        kept = [members[known[members]] for members in groups.values()]
        return np.stack([values[members].mean(axis=0) if len(members) else values[0] * np.nan for members in kept])

    with_averages = {name: np.concatenate([values, averages(values)]) for name, values in measured.items()}
    return [*rho, *log_eigenvalue, *groups], with_averages


def _table(names: list[str], widths: np.ndarray, measured: dict[str, np.ndarray]) -> xr.Dataset:
    errors = {f"{name}_error": jackknife(measured[f"{name}_without"]) for name in ("distance", "squared")}
    rows = zip(measured["squared"], measured["squared_without"], errors["squared_error"], strict=True)
    fits = [fit_rate(widths, *row) for row in rows]
    columns = ("distance", "distance_error", "floor", "squared", "squared_error")
    data = {name: (("quantity", "width"), (measured | errors)[name]) for name in columns}
    rates = dict(zip(("rate", "rate_error", "constant"), np.asarray(fits).T, strict=True))
    data |= {name: ("quantity", values) for name, values in rates.items()}
    return xr.Dataset(data, coords={"quantity": names, "width": widths})
