"""Figures of docs/notebooks.md that no notebook has, of a small fit."""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
from PIL import Image

import sdeinfer as si
from sdeinfer import plots

jax.config.update("jax_enable_x64", val=True)
layer = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.6)
data = si.sample_networks(layer, V0, width=64, depth=12, networks=64, key=jax.random.key(0))
post = si.fit(si.models.full_path, data, key=jax.random.key(1))

for plot in (plots.plot_ranks, plots.plot_terminal_correlation, plots.plot_innovations):
    plot(post)
    path = Path(__file__).with_name(f"{plot.__name__}.png")
    plt.savefig(path, dpi=200, bbox_inches="tight")  # pages show it at half of its pixels
    plt.close()
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
