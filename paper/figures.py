"""The two figures of the paper: `python paper/figures.py [FOLDER] [--small]`, a few minutes on two cores."""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import sdeinfer as si
from sdeinfer import plots
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.plots._style import NEUTRAL, SDE

SD, HEADS = 0.02, 8


def inference(*, networks: int, draws: int) -> plt.Figure:
    """Networks of known parameters: their correlations and the SDE's, and the posterior of γ by two laws."""
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=4, correlation=0.0, norm=1.6)
    data = si.sample_networks(truth, V0, width=64, depth=16, networks=networks, key=jr.key(0))
    settings = {"draws": draws, "warmup": draws, "key": jr.key(1), "progress": False}
    posts = {law: si.fit(si.models.full_path, data, law=law, **settings) for law in ("finite-width", "limit")}
    post = posts["finite-width"]
    print(si.check(post, data))

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    plots.plot_correlation_paths(post, axes=left)
    laws = (("finite-width", "law of width n", "-"), ("limit", "law of the limit", "--"))
    for (law, label, line), colour in zip(laws, (SDE, NEUTRAL), strict=True):
        gamma = np.ravel(posts[law]["posterior"]["gamma"])
        style = {"histtype": "step", "color": colour, "linestyle": line, "lw": 1.5}
        right.hist(gamma, 25, density=True, label=f"posterior, {label}", **style)
        print(f"γ by the {label}: {gamma.mean():.4f} ± {gamma.std():.4f}")
    right.axvline(truth.gamma, color=plots.look(0)["color"], lw=1.5, label="truth")
    right.set(xlabel="residual strength γ", ylabel="posterior density")
    plots.finish(right)
    plots.legend_below([left, right])
    return figure


class Attention(eqx.Module):
    """Causal attention."""

    qkv: jax.Array
    out: jax.Array

    def __call__(self, x):
        """What the branch adds to tokens of which x is the norm."""
        q, k, v = (x @ self.qkv).reshape(len(x), 3, HEADS, -1).swapaxes(0, 1)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ self.out


class FeedForward(eqx.Module):
    """Two matrices and GELU."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        """What the branch adds to tokens of which x is the norm."""
        return jax.nn.gelu(x @ self.up) @ self.down


class Layer(eqx.Module):
    """A layer of GPT-2: Pre-LN, attention, then the MLP."""

    attn: Attention
    mlp: FeedForward
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key, width, last):
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        qkv, out, up, down = (jr.normal(each, shape) for each, shape in zip(jr.split(key, 4), shapes, strict=True))
        self.attn, self.mlp = Attention(SD * qkv, last * out), FeedForward(SD * up, last * down)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x):
        """Tokens after the layer."""
        x = x + self.attn(jax.vmap(self.norms[0])(x))
        return x + self.mlp(jax.vmap(self.norms[1])(x))


class GPT2(eqx.Module):
    """Layers of GPT-2; `scaled` tells whether the factor 1/√(2L) of the last matrices is applied."""

    layers: list[Layer]

    def __init__(self, key, *, width, depth, scaled):
        last = SD / np.sqrt(2 * depth) if scaled else SD
        self.layers = [Layer(each, width, last) for each in jr.split(key, depth)]

    def __call__(self, x):
        """Tokens after the last layer."""
        return self.stream(x)[-1]

    def stream(self, x):
        """Tokens before the first and after each layer."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states


def audit(*, width: int, depth: int) -> plt.Figure:
    """A GPT-2 with and without its factor 1/√(2L): strengths of its branches, and what follows for the tokens."""
    tokens = SD * np.sqrt(2) * jr.normal(jr.key(1), (4, width))  # the sum of two embeddings
    found, models = {}, {}
    for label, scaled in (("without the factor", False), ("correct", True)):
        models[label] = GPT2(jr.key(0), width=width, depth=depth, scaled=scaled)
        found[label] = si.audit(models[label], tokens, recipe="gpt2")
        print(f"{label}: {found[label]}")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, each in enumerate(found.values()):
        style, last = plots.look(number), [row for row in each.rows if row.matrix.last]
        left.plot(np.arange(len(last)) / 2, [row.ratio for row in last], style["marker"], color=style["color"], ms=4)
    left.axhline(1, color=NEUTRAL, lw=0.8)
    left.set(xlabel="layer (attention, then MLP)", ylabel="σ of last matrices over declared", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    plots.finish(left)
    V0 = np.asarray(tokens @ tokens.T) / width
    sizes = {"width": width, "depth": depth, "networks": 128, "key": jr.key(0)}
    bands = {}
    for label, each in found.items():
        strengths = {row.matrix.role: row.law.sd * row.matrix.fan_in**0.5 for row in each.rows if row.matrix.last}
        attention = SelfAttention(gain=width * SD**2, heads=HEADS, pattern=si.CAUSAL)
        mlp = MLP(gain=width * SD**2, activation="gelu_tanh", expansion=4)
        branches = ((attention, strengths["attention output"]), (mlp, strengths["mlp output"]))
        blocks = si.Stack(tuple(Block(branch, strength, norm="layer") for branch, strength in branches))
        V = si.sample_networks(blocks, V0, **sizes)["covariance"].values
        bands[label] = np.trace(V, axis1=-2, axis2=-1) / len(V0)
    plots.plot_bands(np.arange(depth + 1), bands, axes=right)
    for label, model in models.items():
        squares = [float(jnp.mean(x**2)) for x in model.stream(tokens)]
        right.plot(squares, "k.", label="these networks" if label == "correct" else None)
    right.set(xlabel="layer", ylabel="mean square of tokens", yscale="log")
    right.legend(frameon=False, fontsize="small")
    return figure


def main() -> None:
    """Write `inference.png` and `audit.png`."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("folder", type=Path, nargs="?", default=here, help="default: that of the paper")
    parser.add_argument("--small", action="store_true", help="fewer networks and layers, for tests")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", val=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    small = options.small
    figures = {
        "inference": inference(networks=16 if small else 128, draws=100 if small else 1000),
        "audit": audit(width=64 if small else 256, depth=3 if small else 12),
    }
    for name, figure in figures.items():
        figure.savefig(options.folder / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
