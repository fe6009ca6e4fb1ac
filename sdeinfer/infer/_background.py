"""Programs that a fit compiles in other threads while it prepares the data."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import xarray as xr

from sdeinfer.infer._nuts import NUTS, compile_nuts
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._sandwich import compile_scatter
from sdeinfer.likelihood import AbstractModel, Assumptions, EveryLayer


@contextlib.contextmanager
def background_threads() -> Iterator[ThreadPoolExecutor]:
    """Background threads; their pending tasks are cancelled if the fit raises an error."""
    pool = ThreadPoolExecutor(2)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def compile_ahead(
    background: ThreadPoolExecutor,
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    sampler: AbstractSampler,
) -> None:
    """Start to compile what the fit of a model of the package will need, for the shapes of its data."""
    if not isinstance(model, EveryLayer) or model.makes_layers or type(sampler) is not NUTS:
        return
    widths, kind = np.unique(data["width"]), assumptions.kind
    shapes = {"tokens": data.sizes["token_a"], "widths": len(widths), "x64": jax.config.jax_enable_x64}
    if assumptions.law != "limit":
        background.submit(compile_scatter, kind, **shapes, width=int(widths[0]))
    background.submit(compile_nuts, sampler, model, assumptions, **shapes, pattern=kind.pattern)
