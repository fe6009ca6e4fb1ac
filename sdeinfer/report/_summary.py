"""A fit as plain numbers, in JSON."""

import json
import math
from pathlib import Path

import xarray as xr

from sdeinfer._files import write_text
from sdeinfer.diagnostics import Check, fixed_of, summarise


def summary(post: xr.DataTree, verdicts: Check) -> dict[str, object]:
    """Summarise a fit as plain numbers.

    Returns:
        `parameters`: mean, sd, hdi_low, hdi_high, rhat, ess_bulk and ess_tail of each, and truth if known;
        `divergences`; `elapsed_s` if the fit was timed; `verdict` in words; `trusted`, `unidentified`, `assumed` and
        `notes`, see `Check`; `checks`: every verdict; and
        `fixed`: coordinates that were fixed, and their values; `architecture`, `model`, `law` and `left_out`, the
        fraction of transitions left out.
    """
    rows = summarise(post).to_dict(orient="index")
    return {
        "parameters": {
            str(name): {key: _number(value) for key, value in row.items() if key != "truth" or not math.isnan(value)}
            for name, row in rows.items()
        },
        "fixed": fixed_of(post),
        "divergences": int(post.children["sample_stats"].to_dataset()["diverging"].sum()),
        "elapsed_s": post.attrs.get("elapsed_s"),
        "verdict": verdicts.verdict,
        "trusted": verdicts.passed,
        "unidentified": list(verdicts.unidentified),
        "assumed": list(verdicts.assumed),
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


def _number(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def write_summary(post: xr.DataTree, verdicts: Check, path: str | Path) -> None:
    """Write the summary as JSON."""
    numbers = summary(post, verdicts)
    write_text(path, json.dumps(numbers, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
