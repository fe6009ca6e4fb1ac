"""A fit as one page that a person reads: HTML with everything inlined, no network access needed."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path

import jinja2
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from sdeinfer._files import staged_file
from sdeinfer.check import Check, summarise
from sdeinfer.infer import LIMIT_POSTERIOR
from sdeinfer.layers import SIZES
from sdeinfer.plots import (
    plot_correlation_paths,
    plot_posterior,
    plot_ranks,
    plot_terminal_correlation,
)

DPI = 120

CAPTIONS = {
    "posterior": "Posterior of each parameter with its mean and 94 % interval; dashed: the truth, where known. Of c₊ "
    "and c₋ networks of one width know one number, close to their gap; the rest of the two is the prior's.",
    "correlation_paths": "Correlations between tokens over depth: observed networks against the SDE at draws from the "
    "posterior, started at the networks' own first covariances.",
    "terminal_correlation": "Correlations after the last layer: observed networks against the SDE.",
    "ranks": "Ranks of each chain's draws among all draws, less their expectation: curves that stay near zero, with p "
    "above α, mean that the chains agree.",
}
"""The figures of a report, by file name, and what they show."""


def figures(post: xr.DataTree) -> dict[str, Figure]:
    """Make every figure that a posterior allows: correlations need two tokens, ranks need two chains."""
    drawn = {"posterior": plot_posterior(post)}
    if post.children["observed_data"].sizes["token_a"] > 1:
        drawn |= {
            "correlation_paths": plot_correlation_paths(post),
            "terminal_correlation": plot_terminal_correlation(post),
        }
    if post.children["posterior"].sizes["chain"] > 1:
        drawn["ranks"] = plot_ranks(post)
    return drawn


def write_figures(drawn: Mapping[str, Figure], folder: str | Path) -> None:
    """Write each figure to `folder/<name>.png`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        with staged_file(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, dpi=DPI)


def write_report(post: xr.DataTree, verdicts: Check, drawn: Mapping[str, Figure], path: str | Path) -> None:
    """Write the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sdeinfer.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    observed = post.children["observed_data"]
    page = environment.get_template("page.html.jinja").render(
        verdict=verdicts.verdict,
        passed=verdicts.passed,
        checks=verdicts.verdicts,
        parameters=summarise(post),
        limit=summarise(post, group=LIMIT_POSTERIOR) if LIMIT_POSTERIOR in post.children else None,
        figures=[(name, CAPTIONS[name], _inline(figure)) for name, figure in drawn.items()],
        sizes={
            "architecture": _architecture(post),
            "networks": observed.sizes["network"],
            "observed layers": observed.sizes["layer"],
            "tokens": observed.sizes["token_a"],
            "width": ", ".join(f"{n:g}" for n in np.unique(post.children["constant_data"].to_dataset()["width"])),
            "law": post.attrs.get("law", "limit"),
            "transitions left out": f"{post.attrs.get('left_out', 0.0):.2%}",
            "exploded predictions": f"{post.children['posterior_predictive'].attrs['exploded']:.2%}",
        },
        provenance={
            name: post.attrs[name]
            for name in ("model", "command", "seed", "elapsed_s", "created_at", "sdeinfer_version")
            if name in post.attrs
        },
    )
    with staged_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _architecture(post: xr.DataTree) -> str:
    sizes = [f"{name.replace('_', ' ')} {post.attrs[name]:g}" for name in SIZES if name in post.attrs]
    return ", ".join([str(post.attrs["architecture"]), *sizes])


def _inline(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
