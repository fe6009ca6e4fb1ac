"""Figures of docs/notebooks.md that no notebook has, of a small fit."""

from pathlib import Path

import jax
import matplotlib.pyplot as plt

import sdeinfer as si
from sdeinfer import plots

jax.config.update("jax_enable_x64", val=True)
layer = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.6)
data = si.sample_networks(layer, V0, width=64, depth=12, networks=64, key=jax.random.key(0))
post = si.fit(si.models.full_path, data, key=jax.random.key(1))

for plot in (plots.plot_ranks, plots.plot_terminal_correlation, plots.plot_innovations):
    plot(post)
    plt.savefig(Path(__file__).with_name(f"{plot.__name__}.png"), dpi=100, bbox_inches="tight")
    plt.close()
