"""Transformers of Hugging Face's library at initialisation: from hooks to pooled strengths and a verdict.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers and this package; its default is the one that runs
the tests. Versions 5.0 to 5.14 of transformers do not scale GPT-2's last matrices by 1/√(2L).
"""

import json
from pathlib import Path

import budget
import jax.random as jr
import numpy as np
import pytest
import torch_interpreter
import xarray as xr
from scipy import stats
from torch_blocks import MODELS, stack_of

import sdeinfer as si
from sdeinfer.blocks._coefficients import LOG_FACTORS
from sdeinfer.diagnostics import Check

pytestmark = pytest.mark.torch

SEEDS = 5


def fitted(folder: Path, name: str, seed: int) -> tuple[Check, np.ndarray, np.ndarray]:
    """The check; mean and standard deviation of strengths over the declared ones; χ² and its degrees of freedom."""
    data = xr.load_dataset(folder / f"{name}-{seed}.nc", engine="h5netcdf")
    declared = stack_of(json.loads((folder / f"{name}.json").read_text()))
    post = si.fit(si.models.branches, data, architecture=declared, key=jr.key(seed))  # pyright: ignore[reportAttributeAccessIssue]
    ratios, squares = [], []
    found, m = post["coefficients"].to_dataset(), data.sizes["token_a"]
    for kind in ("attention", "mlp"):
        strength = post["posterior"].to_dataset()[f"{kind}.strength"].values
        ratio = strength / post.attrs[f"declared_{kind}.strength"]
        ratios.append((ratio.mean(), ratio.std()))
        at = found["log_density"].values[:, found["part"].values == kind, len(LOG_FACTORS) // 2]
        log_factor = 2 * np.log(strength.mean())
        squares.append(
            (
                -2 * (at[..., 0] + at[..., 1] * log_factor + at[..., 2] * log_factor**2).sum(),
                at[..., 0].size * m * (m + 1) // 2 - 1,
            )
        )
    return si.check(post, data), np.array(ratios), np.array(squares)


@pytest.mark.parametrize(
    ("name", "width", "sigma"),
    [(name, 384, 0.02) for name in MODELS] + [("llama", 256, 0.08)],
    ids=[*MODELS, "llama of large weights"],
)
def test_declared_strengths_are_recovered(name, width, sigma, tmp_path):
    """In the last case logits and activations are far from linear."""
    torch_interpreter.run(
        "torch_blocks.py",
        tmp_path,
        "--models",
        name,
        "--width",
        str(width),
        "--sigma",
        str(sigma),
        "--seeds",
        str(SEEDS),
        JAX_ENABLE_X64="1",
    )
    checks, ratios, squares = zip(*(fitted(tmp_path, name, seed) for seed in range(SEEDS)), strict=True)
    ratios, squares = np.stack(ratios), np.stack(squares)
    weights = ratios[..., 1] ** -2
    pooled, error = (weights * ratios[..., 0]).sum(0) / weights.sum(0), weights.sum(0) ** -0.5
    total = squares.sum(0)
    for k, kind in enumerate(("attention", "mlp")):
        low, high = stats.chi2.ppf([0.005, 0.995], total[k, 1]) / total[k, 1]
        print(
            f"\n{name}, n = {width}, σ = {sigma}, {SEEDS} networks, {kind}: {pooled[k]:.4f} ± {error[k]:.4f}, single"
            f" ± {ratios[:, k, 1].mean():.4f}, χ²/df {total[k, 0] / total[k, 1]:.3f} (99 %: {low:.3f}–{high:.3f}), "
            f"single {(squares[:, k, 0] / squares[:, k, 1]).round(2)}"
        )
    budget.assert_within((ratios[..., 0] - 1) / ratios[..., 1], "strengths")
    budget.assert_within((pooled - 1) / error, "pooled strengths")
    budget.assert_within(stats.norm.isf(stats.chi2.sf(total[:, 0], total[:, 1])), "χ²")
    assert [each.verdict[:4] for each in checks] == ["good"] * SEEDS, [each.verdict for each in checks]
