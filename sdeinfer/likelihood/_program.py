"""NumPyro programs of users, which build layers and observe networks of them: checked before a fit."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from numpyro import handlers
from numpyro.distributions import ImproperUniform, MaskedDistribution, Unit
from numpyro.primitives import Messenger

from sdeinfer._files import InputError, first_line
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._bridge import Bridged
from sdeinfer.likelihood._full_path import CovariancePath, FullPath
from sdeinfer.likelihood._statistics import PathStatistics

PATH = "covariance"
"""Name of the observed networks in results, whatever the name of a program's site."""

type Trace = Mapping[str, dict[str, Any]]


def shared_layer(program: Callable[[Any], None], single: PathStatistics, pair: PathStatistics) -> AbstractLayer:
    """The layer that a program of one layer for all networks observes, for statistics of one network and of two."""
    (layer, shapes), (_, pair_shapes) = (observed_by(program, statistics) for statistics in (single, pair))
    name, of_each = program_name(program), [site for site in shapes if shapes[site] != pair_shapes.get(site)]
    if any(leaf.ndim for leaf in jax.tree.leaves(layer)):
        of_each.append("the layer")
    if layer is None or of_each:
        why = f"{of_each[0]} is of each network" if of_each else "no single layer is observed"
        raise InputError(f"model: {name} is declared for one layer of all networks, but {why}: si.models.each_network")
    return layer


def observed_by(
    program: Callable[[Any], None], statistics: PathStatistics
) -> tuple[AbstractLayer | None, dict[str, Any]]:
    """The layer, of shapes, with a leading axis if each network has its own (None without a single one); and all sites.

    Of each site the shapes; of networks those of mask and scale, and how many lack.
    """
    sites: dict[str, Any] = {}

    def run(statistics: PathStatistics) -> AbstractLayer | None:
        trace = _trace_of(program, statistics)
        _require_observed(program, trace, statistics.networks)
        for name, site in trace.items():
            if observes_path(site):
                missing = statistics.networks - _paths_in(site["fn"])[0].path.networks
                sites[name] = missing, _shape_of_mask(site["fn"]), getattr(site["scale"], "shape", ())
            elif site["type"] == "sample":
                sites[name] = jnp.shape(site["value"]), site["fn"].batch_shape
        return layer_in(trace)

    return jax.eval_shape(run, statistics), sites


def _trace_of(program: Callable[[Any], None], statistics: PathStatistics) -> Trace:
    """The sites of a program; where a plate does not fit, an error that names it."""
    require = functools.partial(_require_fittable, program_name(program))
    with handlers.trace() as trace, handlers.seed(rng_seed=jr.key(0)), handlers.substitute(substitute_fn=require):
        try:
            program(statistics)
        except ValueError as error:
            if isinstance(error, InputError) or "broadcasting" not in str(error):
                raise
            plates = [f"{name} of {len(site['value'])}" for name, site in trace.items() if site["type"] == "plate"]
            raise InputError(
                f"model: {program_name(program)} has a plate {' and '.join(plates)}, which does not fit "
                f"{statistics.networks} networks: numpyro.plate(…, path.networks) does ({first_line(error)})"
            ) from None
    return trace


def _require_observed(program: Callable[[Any], None], trace: Trace, networks: int) -> None:
    """Raise an InputError if networks are not observed, or twice, or if another site has their name."""
    name = program_name(program)
    laws = [_unwrapped(site["fn"]) for site in trace.values() if site["type"] == "sample"]
    if not any(map(observes_path, trace.values())) and not any(isinstance(law, Unit) for law in laws):
        raise InputError(f"model: {name} must observe one si.likelihood.CovariancePath, obs=path.observed")
    counts = {site: _paths_in(trace[site]["fn"])[0].path.networks for site in trace if observes_path(trace[site])}
    if len(counts) > 1 and sum(counts.values()) > networks:
        raise InputError(
            f"model: {name} observes networks twice, at {' and '.join(counts)}: observe all at one site, or some at "
            "each, by path[indices]"
        )
    namesake = trace.get(PATH)
    if namesake is not None and namesake.get("is_observed") and not observes_path(namesake):
        raise InputError(f"model: {PATH} is the name of the observed networks; the site of {name} needs another")


def _require_fittable(name: str, site: Mapping[str, Any]) -> None:
    """Raise an InputError for some of a plate, and for a latent site without gradients or without prior draws."""
    size, some = site["args"] if site["type"] == "plate" else (None, None)
    if some not in (None, size):
        raise InputError(
            f"model: the plate {site['name']} of {name} takes {some} of {size}, and a fit takes all: leave "
            "subsample_size out, also for si.prepare, whose path HMCECS and SVI take with it, by path[indices]"
        )
    if site["type"] != "sample" or site["is_observed"] or site["value"] is not None:
        return
    subject, law = f"model: {site['name']} of {name}", _unwrapped(site["fn"])
    if _paths_in(law):
        raise InputError(
            f"{subject} is not observed: obs=path.observed is needed, and instead of obs_mask fewer networks"
        )
    if law.support.is_discrete:
        raise InputError(
            f"{subject} is discrete, and has no gradient: sum it out, by a MixtureGeneral or numpyro.factor"
        )
    if isinstance(law, ImproperUniform):
        raise InputError(f"{subject} has an improper prior, which cannot be drawn")


def observes_path(site: Mapping[str, Any]) -> bool:
    """Whether a site of a trace is observed networks, by one law or by a mixture of several."""
    return site["type"] == "sample" and site["is_observed"] and bool(_paths_in(site["fn"]))


def layer_in(trace: Mapping[str, dict[str, Any]]) -> AbstractLayer | None:
    """The layer of the networks' law in a trace; None unless it is the only one."""
    laws = [_unwrapped(site["fn"]) for site in trace.values() if site["type"] == "sample"]
    bridged = [law.layer for law in laws if isinstance(law, Bridged)]
    paths = [path for law in laws for path in _paths_in(law)]
    layers = [*bridged, *(path.layer if isinstance(path, CovariancePath) else None for path in paths)]
    return layers[0] if len(layers) == 1 else None


def _paths_in(distribution: Any) -> list[FullPath]:
    """The laws of paths in a distribution."""
    base = _unwrapped(distribution)
    components = [_unwrapped(part) for part in getattr(base, "component_distributions", [base])]
    return [part for part in components if isinstance(part, FullPath)]


def _shape_of_mask(distribution: Any) -> tuple[int, ...]:
    """The shape of the mask of a distribution, with those of what it wraps; of no mask or one of one number ()."""
    shape = jnp.shape(distribution._mask if isinstance(distribution, MaskedDistribution) else True)
    return shape + (_shape_of_mask(distribution.base_dist) if hasattr(distribution, "base_dist") else ())


def _unwrapped(distribution: Any) -> Any:
    """The base distribution, without masks, scales and expansions."""
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution


def inside(program: Any) -> Any:
    """The innermost program, without given arguments and handlers."""
    while True:
        if isinstance(program, functools.partial):
            program = program.func
        elif isinstance(program, Messenger) and program.fn is not None:
            program = program.fn
        else:
            return program


def program_name(program: Any) -> str:
    """The name of a program, of one with some arguments given, or of one in a handler."""
    if isinstance(program, functools.partial):
        return program_name(program.func)
    if isinstance(program, Messenger) and program.fn is not None:
        return f"{type(program).__name__}({program_name(program.fn)})"
    return getattr(program, "__name__", None) or getattr(program, "name", None) or type(program).__name__
