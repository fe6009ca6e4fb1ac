"""A fit in numbers, for machines."""

import json
import math
from pathlib import Path

import xarray as xr

from sdeinfer._files import write_whole
from sdeinfer.check import Check, summarise


def summary(post: xr.DataTree, verdicts: Check) -> dict[str, object]:
    """Summarise a fit as plain numbers.

    Returns:
        `parameters`: for each, mean, sd, hdi_low, hdi_high, rhat, ess_bulk, ess_tail, and truth where known;
        `divergences`; `elapsed_s` where the fit was timed; `verdict` in words; `checks`: every single verdict.
    """
    rows = summarise(post).to_dict(orient="index")
    return {
        "parameters": {
            str(name): {str(key): value for key, value in row.items() if not math.isnan(value)}
            for name, row in rows.items()
        },
        "divergences": int(post.children["sample_stats"].to_dataset()["diverging"].sum()),
        "elapsed_s": post.attrs.get("elapsed_s"),
        "verdict": verdicts.verdict,
        "checks": verdicts.to_frame().to_dict(orient="index"),
        "architecture": post.attrs["architecture"],
        "model": post.attrs["model"],
    }


def write_summary(post: xr.DataTree, verdicts: Check, path: str | Path) -> None:
    """Write the summary as JSON."""
    text = json.dumps(summary(post, verdicts), indent=2, ensure_ascii=False, default=float) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
