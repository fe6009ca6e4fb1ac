"""The form of a NumPyro program: one layer for all networks, one for each, or networks without a single layer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import PyTree
from numpyro import handlers
from numpyro.distributions import ImproperUniform, MaskedDistribution, Unit
from numpyro.primitives import Messenger

from sdeinfer._files import InputError, first_line
from sdeinfer.layers import AbstractLayer, Architecture, kind_of
from sdeinfer.likelihood._bridges import Bridged
from sdeinfer.likelihood._full_path import CovariancePath, FullPath
from sdeinfer.likelihood._statistics import PathStatistics

PATH = "covariance"
"""Name of the observed networks in results, whatever the name of a program's site."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a program observes networks.

    Attributes:
        kind: the kind of layer; None for a program that observes the path otherwise, by a mixture, by several
            distributions or by a factor.
        own: whether each network has its own layer.
        pooled: whether the statistics can be summed over the networks of one width. They cannot if the program has
            own layers, sites or covariates of the networks, or no single layer.
    """

    kind: Architecture | None
    own: bool = False
    pooled: bool = True


class Shapes:
    """The structure of a tree of arrays with their shapes and types; hashable."""

    def __init__(self, tree: PyTree):
        leaves, structure = jax.tree.flatten(tree)
        self._key = structure, tuple(jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shapes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def tree(self) -> PyTree:
        """The tree, with shapes and types in place of arrays."""
        structure, leaves = self._key
        return structure.unflatten(leaves)


def form_of(program: Callable[[Any], None], statistics: PathStatistics) -> Form:
    """The form of a program, found by tracing it once for data of each shape.

    Raises:
        InputError: if the program observes neither a path nor a factor, or has a plate of another number of networks.
    """
    return _form_of(program, Shapes(statistics))


@functools.lru_cache(maxsize=64)
def _form_of(program: Callable[[Any], None], shapes: Shapes) -> Form:
    statistics = shapes.tree()
    layer = _layer_of(program, statistics)
    if layer is None:
        return Form(None, pooled=False)
    kind, own = kind_of(layer), any(leaf.ndim for leaf in jax.tree.leaves(layer))
    return Form(kind, own, pooled=not own and _needs_no_networks(program, statistics))


def _needs_no_networks(program: Callable[[Any], None], statistics: PathStatistics) -> bool:
    """Whether all sites but the observed path have the same shapes for another number of networks."""
    count = statistics.weights.shape[0] + 1
    each = {
        name: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)
        for name in ("weights", "constant", "width")
        for leaf in (getattr(statistics, name),)
    }
    others = dataclasses.replace(statistics, **each, initial=None, depth=0)
    try:
        return _site_shapes(program, others) == _site_shapes(program, statistics)
    except (TypeError, ValueError):  # a covariate or a plate of every network does not fit others
        return False


def _layer_of(program: Callable[[Any], None], statistics: PathStatistics) -> AbstractLayer | None:
    """Shapes and types of the layer that a program observes, with a leading axis if each network has its own."""
    name = name_of(program)

    def run(statistics: PathStatistics) -> AbstractLayer | None:
        trace = _trace_of_program(program, statistics)
        if not any(observes_path(site) or _is_factor(site) for site in trace.values()):
            raise InputError(f"model: {name} must observe one si.likelihood.CovariancePath, obs=path.observed")
        _require_each_once(name, trace, statistics.networks)
        namesake = trace.get(PATH)
        if namesake is not None and namesake.get("is_observed") and not observes_path(namesake):
            raise InputError(f"model: {PATH} is the name of the observed networks; the site of {name} needs another")
        return layer_in(trace)

    return jax.eval_shape(run, statistics)


def _trace_of_program(program: Callable[[Any], None], statistics: PathStatistics) -> Mapping[str, dict[str, Any]]:
    """The sites of a program; where a plate does not fit, an error that names it."""
    require = functools.partial(_require_fittable, name_of(program))
    with handlers.trace() as trace, handlers.seed(rng_seed=jr.key(0)), handlers.substitute(substitute_fn=require):
        try:
            program(statistics)
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError) or "broadcast" not in str(error):
                raise
            sizes = {name: len(site["value"]) for name, site in trace.items() if site["type"] == "plate"}
            wrong = [f"{name} of {size}" for name, size in sizes.items() if size != statistics.networks]
            if not wrong:
                raise
            raise InputError(
                f"model: {name_of(program)} has a plate {' and '.join(wrong)}, which does not fit "
                f"{statistics.networks} networks: numpyro.plate(…, path.networks) does ({first_line(error)})"
            ) from None
    return trace


def _require_each_once(name: str, trace: Mapping[str, dict[str, Any]], networks: int) -> None:
    """Raise an InputError for several sites that have more than all networks together."""
    each = {site: _paths_in(trace[site]["fn"])[0].path.networks for site in trace if observes_path(trace[site])}
    if len(each) > 1 and sum(each.values()) > networks:
        raise InputError(
            f"model: {name} observes networks twice, at {' and '.join(each)}: observe all at one site, "
            "or some at each, by path[indices]"
        )


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
    own, law = f"model: {site['name']} of {name}", _unwrapped(site["fn"])
    if _paths_in(law):
        raise InputError(f"{own} is not observed: obs=path.observed is needed, and instead of obs_mask fewer networks")
    if law.support.is_discrete:
        raise InputError(f"{own} is discrete, and has no gradient: sum it out, by a MixtureGeneral or numpyro.factor")
    if isinstance(law, ImproperUniform):
        raise InputError(f"{own} has an improper prior, which cannot be drawn")


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
    each = [_unwrapped(part) for part in getattr(base, "component_distributions", [base])]
    return [part for part in each if isinstance(part, FullPath)]


def _is_factor(site: Mapping[str, Any]) -> bool:
    return site["type"] == "sample" and isinstance(_unwrapped(site["fn"]), Unit)


def _site_shapes(program: Callable[[Any], None], prepared: Any) -> dict[str, Any]:
    """Shapes of all sites but the observed path, and of their laws; of that the shapes of its mask and its scale."""
    shapes: dict[str, Any] = {}

    def run(prepared: Any) -> None:
        for name, site in handlers.trace(handlers.seed(program, jr.key(0))).get_trace(prepared).items():
            if observes_path(site):
                shapes[name] = _shape_of_mask(site["fn"]), getattr(site["scale"], "shape", ())
            elif site["type"] == "sample":
                shapes[name] = jnp.shape(site["value"]), site["fn"].batch_shape

    jax.eval_shape(run, prepared)
    return shapes


def _shape_of_mask(distribution: Any) -> tuple[int, ...]:
    """The shape of the mask of a distribution, with those of what it wraps; of no mask or one of one number ()."""
    here = jnp.shape(distribution._mask if isinstance(distribution, MaskedDistribution) else True)
    return here + (_shape_of_mask(distribution.base_dist) if hasattr(distribution, "base_dist") else ())


def _unwrapped(distribution: Any) -> Any:
    """The base distribution, without masks, scales and expansions."""
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution


def name_of(program: Any) -> str:
    """The name of a program, of one with some arguments given, or of one in a handler."""
    while isinstance(program, functools.partial):
        program = program.func
    if isinstance(program, Messenger) and program.fn is not None:
        return f"{type(program).__name__}({name_of(program.fn)})"
    return getattr(program, "__name__", None) or getattr(program, "name", None) or type(program).__name__
