"""A fit as one HTML page with everything inlined, so that it needs no network access, and as plain numbers."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdeinfer._files import write_text
from sdeinfer._html import render, significant
from sdeinfer.diagnostics import Check, identification, summarise
from sdeinfer.diagnostics._summary import fixed_of, has_prior, identified_of, parameters_of, with_chains
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.layers import kind_in_words
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in
from sdeinfer.parameters import SLOPES, SYMBOLS
from sdeinfer.plots import (
    plot_correlation_paths,
    plot_innovations,
    plot_posterior,
    plot_ranks,
    plot_terminal_correlation,
)
from sdeinfer.report._render import figure_of, inline, moment, versions

CAPTIONS = {
    "posterior": "Posterior of each parameter with its mean and 94 % interval; dashed: the truth, if known.",
    "correlation_paths": "Correlations between tokens over depth: observed networks against predictions at draws from "
    "the posterior, started at the networks' own first covariances.",
    "terminal_correlation": "Correlations after the last layer, one for each pair of tokens: observed networks against "
    "predictions, with their numbers.",
    "innovations": "Innovations of the layers at the posterior mean, in several directions. If the layers follow the "
    f"fitted law, all are inside of the band in {100 * (1 - LEVEL):g} % of fits.",
    "ranks": "Ranks of each chain's draws among all draws, less even ranks: the chains agree if the curves stay near "
    f"zero. Below p = {LEVEL:g} they do not.",
}
"""Captions of a report's figures, by file name."""


def figures(post: xr.DataTree) -> dict[str, Figure]:
    """Make every figure that a posterior allows: correlations need two tokens and predictions, ranks two chains."""
    post = with_chains(post)
    predicted = post.children.get("posterior_predictive")
    plots: dict[str, Callable[[xr.DataTree], Axes | list[Axes]]] = {"posterior": plot_posterior}
    if post.children["observed_data"].sizes["token_a"] > 1 and predicted is not None and predicted.sizes["draw"]:
        plots |= {"correlation_paths": plot_correlation_paths, "terminal_correlation": plot_terminal_correlation}
    if post.attrs.get("every_layer") and post.attrs.get("architecture") in ARCHITECTURES:
        plots["innovations"] = plot_innovations
    if post.children["posterior"].sizes["chain"] > 1 and identified_of(post):
        plots["ranks"] = plot_ranks
    return {name: figure_of(plot(post)) for name, plot in plots.items()}


def write_report(post: xr.DataTree, verdicts: Check, drawn: Mapping[str, Figure], path: str | Path) -> None:
    """Write the page: what was fitted, verdict, one picture, parameters, tests, other figures and provenance."""
    post = with_chains(post)
    observed = post.children["observed_data"]
    kind = architecture_in(post.attrs) if post.attrs["architecture"] in ARCHITECTURES else None
    sizes = {
        "architecture": kind_in_words(kind) if kind else post.attrs["architecture"],
        "networks": _networks(post),
        "observed layers": observed.sizes["layer"],
        "tokens": observed.sizes["token_a"],
        "width": ", ".join(f"{n:g}" for n in np.unique(post.children["constant_data"].to_dataset()["width"])),
        "law": post.attrs.get("law", "limit"),
        "transitions left out": f"{post.attrs.get('left_out', 0.0):.2%}",
    }
    if "posterior_predictive" in post.children:
        sizes["exploded predictions"] = f"{post.children['posterior_predictive'].attrs['exploded']:.2%}"
    parameters, identified, slopes = summarise(post), _identified(post), _slopes(post)
    pictures = {name: (name, CAPTIONS[name], inline(figure)) for name, figure in drawn.items()}
    first = next((pictures.pop(name) for name in ("correlation_paths", "posterior") if name in pictures), None)
    page = render(
        "page.html.jinja",
        check=verdicts,
        identified=identified,
        parameters=parameters,
        labels={name: _label(str(name)) for name in (*parameters.index, *identified.index)},
        repeats_prior=[*verdicts.unidentified, *slopes],
        slopes=slopes,
        first=first,
        figures=list(pictures.values()),
        provenance=sizes | _provenance(post),
        command=_commands(post),
    )
    write_text(path, page)


def summary(post: xr.DataTree, verdicts: Check) -> dict[str, object]:
    """Summarise a fit as plain numbers.

    Returns:
        `parameters`: mean, sd, hdi_low, hdi_high, rhat, ess_bulk and ess_tail of each, and truth if known;
        `divergences`, None if the sampler does not count them; `elapsed_s` if the fit was timed; `verdict` in words;
        `state`, `trusted`, `unidentified`, `assumed` and `notes`, see `Check`; `checks`: every verdict; and `fixed`:
        coordinates that were fixed, and their values; `architecture`, `model`, `law` and `left_out`, the fraction of
        transitions left out.
    """
    rows, statistics = summarise(post).to_dict(orient="index"), post.children["sample_stats"].to_dataset()
    return {
        "parameters": {
            str(name): {key: _number(value) for key, value in row.items() if key != "truth" or not math.isnan(value)}
            for name, row in rows.items()
        },
        "fixed": fixed_of(post),
        "divergences": int(statistics["diverging"].sum()) if "diverging" in statistics else None,
        "elapsed_s": post.attrs.get("elapsed_s"),
        "verdict": verdicts.verdict,
        "state": verdicts.state,
        "trusted": verdicts.passed,
        "unidentified": list(verdicts.unidentified),
        "assumed": dict(verdicts.assumed),
        "notes": list(verdicts.notes),
        "checks": {
            verdict.name: {
                "topic": verdict.topic,
                "value": _number(verdict.value),
                "threshold": verdict.threshold,
                "passed": bool(verdict.passed),
                "advice": verdict.advice,
            }
            for verdict in verdicts.verdicts
        },
        "architecture": post.attrs["architecture"],
        "model": post.attrs.get("model"),
        "law": post.attrs.get("law", "limit"),
        "left_out": post.attrs.get("left_out", 0.0),
    }


def write_summary(post: xr.DataTree, verdicts: Check, path: str | Path) -> None:
    """Write the summary as JSON."""
    numbers = summary(post, verdicts)
    write_text(path, json.dumps(numbers, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _label(name: str) -> str:
    """A parameter's symbol beside its name, where it has one."""
    symbol = SYMBOLS.get(name.rpartition(".")[2])
    return f"{symbol} ({name})" if symbol else name


def _slopes(post: xr.DataTree) -> list[str]:
    """Slopes of which the data identify the gap alone, so that their posterior is close to the prior."""
    slopes = [name for name in parameters_of(post) if name.rpartition(".")[2] in SLOPES.parameters]
    return [name for name in slopes if name not in identified_of(post)]


def _number(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def _identified(post: xr.DataTree) -> pd.DataFrame:
    """The table of `identification` as texts, with headings in words, and with how many networks 10 % would take."""
    if not has_prior(post):
        return pd.DataFrame()
    titles = {
        "information": "data alone",
        "expected": "expected contraction",
        "networks": "networks for 10 %",
        "to_prior": "sensitivity to prior",
        "to_likelihood": "sensitivity to likelihood",
    }
    table = identification(post)
    texts = table.map(lambda value: significant(value, 2))
    for column in table.columns.intersection(["contraction", "expected"]):
        texts[column] = [f"{value:.2f}" for value in table[column]]
    if "networks" in table:
        texts["networks"] = [_count(times * _networks(post)) for times in table["networks"]]
    return texts.rename(columns=titles)


def _networks(post: xr.DataTree) -> int:
    """How many networks were fitted; a posterior of data in chunks holds some of them."""
    return int(post.attrs.get("networks", post.children["observed_data"].sizes["network"]))


def _count(number: float) -> str:
    """An estimate of a count, to two digits and rounded up."""
    return f"{math.ceil(float(f'{number:.2g}')):,}" if number < 1e7 else f"{number:.0e}"


def _provenance(post: xr.DataTree) -> dict[str, Any]:
    covariance = np.ascontiguousarray(post.children["observed_data"].to_dataset()["covariance"].values)
    recorded = {
        "model": "model",
        "command": "command",
        "seed": "seed",
        "elapsed_s": "seconds of the fit",
        "created_at": "date of the fit",
        "sdeinfer_version": "version of sdeinfer",
    }
    facts = {words: post.attrs[name] for name, words in recorded.items() if name in post.attrs}
    if "created_at" in post.attrs:
        facts[recorded["created_at"]] = moment(datetime.fromisoformat(post.attrs["created_at"]))
    return {
        **facts,
        "page by": versions("sdeinfer", "jax", "diffrax", "numpyro", "arviz-stats"),
        "data (SHA-256)": hashlib.sha256(covariance.tobytes()).hexdigest(),
    }


def _commands(post: xr.DataTree) -> str:
    """The commands that reproduce the posterior and this page."""
    if "command" in post.attrs:
        return f"uv run {post.attrs['command']}\nuv run sdeinfer report POSTERIOR"
    sizes = post.children["posterior"].sizes
    return (
        f"post = si.fit(si.models.{post.attrs['model']}, data, architecture={post.attrs['architecture']!r}, "
        f"law={post.attrs.get('law', 'limit')!r}, chains={sizes['chain']}, draws={sizes['draw']}, key=…)"
    )
