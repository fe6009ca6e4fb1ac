"""Audits of models of other libraries, as these initialise them: PyTorch, timm, x-transformers and JAX.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/audit_libraries.py OUT.json [pytorch] [timm] [x-transformers] [jax]`.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from limited import limited

import sdeinfer as si

SECONDS = 120
"""Time after which a model is given up."""

LARGEST = 90_000_000
"""Number of parameters up to which a model of timm is taken."""

Made = Iterator[tuple[str, Callable[[], Any], Any, Any]]
"""Names, functions that make models, inputs (None for those that are made), recipes."""


def of_pytorch() -> Made:
    import torch

    nn = torch.nn
    torch.manual_seed(0)
    x = torch.randn(2, 8, 64)

    def encoder():
        layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
        found = nn.TransformerEncoder(layers[0], 4, enable_nested_tensor=False)
        found.layers = nn.ModuleList(layers)
        return found

    yield "nn.TransformerEncoder, layers drawn", encoder, x, "pytorch"
    yield "nn.Transformer", lambda: nn.Transformer(64, 4, 3, 3, 128, batch_first=True), {"src": x, "tgt": x + 1}, None
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    yield "nn.TransformerDecoder", lambda: nn.TransformerDecoder(layer, 3), {"tgt": x, "memory": x + 1}, None
    yield "nn.LSTM", lambda: nn.LSTM(64, 64, batch_first=True), x, None


def of_timm() -> Made:
    import timm
    import torch

    words = (
        "test_",
        "atto",
        "femto",
        "pico",
        "nano",
        "xxs",
        "xxt",
        "micro",
        "tiny",
        "_xs",
        "x0_5",
        "18",
        "small",
        "_s",
    )

    def chosen(names: list[str]) -> str:
        ranked = sorted(names, key=lambda name: (next((k for k, w in enumerate(words) if w in name), 99), len(name)))
        for name in ranked[:4]:
            with torch.device("meta"):
                if sum(each.numel() for each in timm.create_model(name).parameters()) <= LARGEST:
                    return name
        return ranked[0]

    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            yield f"timm {module}", lambda names=names: timm.create_model(chosen(names)), None, None


def of_x_transformers() -> Made:
    import x_transformers as xt

    plain = {"dim": 64, "depth": 4, "heads": 4}
    options = {
        "": {},
        "gated, rotary, RMSNorm": {"ff_glu": True, "rotary_pos_emb": True, "use_rmsnorm": True},
        "QK-norm": {"attn_qk_norm": True},
        "grouped keys": {"attn_kv_heads": 2},
        "sandwich": {"sandwich_norm": True},
        "Post-LN": {"pre_norm": False},
    }
    wrapped = functools.partial(xt.TransformerWrapper, num_tokens=199, max_seq_len=64)
    for name, each in options.items():
        layers = xt.Decoder(**plain, **each)
        yield f"x-transformers decoder {name}", functools.partial(wrapped, attn_layers=layers), None, None
    yield "x-transformers encoder", functools.partial(wrapped, attn_layers=xt.Encoder(**plain)), None, None
    images = functools.partial(xt.ViTransformerWrapper, image_size=32, patch_size=8)
    yield "x-transformers ViT", functools.partial(images, attn_layers=xt.Encoder(**plain)), None, None


def of_jax() -> Made:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import jax
    import jax.numpy as jnp
    import jax.random as jr
    from helpers import equinox_transformer as of_equinox

    n, layers = 64, 3
    x = np.random.default_rng(0).standard_normal((2, 8, n)).astype(np.float32)
    yield "Equinox", lambda: of_equinox.Transformer(jr.key(0)), of_equinox.prompt(), of_equinox.RECIPE

    def plain(p, x):
        def layer(x, own):
            u = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
            weights = jax.nn.softmax((u @ own["q"]) @ jnp.swapaxes(u @ own["k"], -1, -2) / n**0.5)
            x = x + weights @ (u @ own["v"]) @ own["o"]
            u = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
            return x + (jax.nn.silu(u @ own["gate"]) * (u @ own["up"])) @ own["down"], None

        return jax.lax.scan(layer, x, p)[0]

    shapes = dict.fromkeys("qkvo", (n, n)) | {"gate": (n, 2 * n), "up": (n, 2 * n), "down": (2 * n, n)}
    keys = jr.split(jr.key(0), len(shapes))
    drawn = zip(shapes.items(), keys, strict=True)
    arrays = {name: 0.02 * jr.normal(key, (layers, *shape)) for (name, shape), key in drawn}
    yield "plain function, scan", lambda: (plain, arrays), x, "normal"
    yield "Flax NNX", nnx_model, x, "lecun"
    yield "Flax Linen", lambda: linen_model(x), x, "lecun"
    yield "Haiku", lambda: haiku_model(x), x, None


def nnx_model():
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, n, rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(n, rngs=rngs), nnx.LayerNorm(n, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, n, decode=False, dropout_rate=0.1, rngs=rngs)
            self.up, self.down = nnx.Linear(n, 4 * n, rngs=rngs), nnx.Linear(4 * n, n, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(64, rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return Model(nnx.Rngs(0))


def linen_model(x):
    import jax
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + linen.MultiHeadDotProductAttention(num_heads=4)(linen.LayerNorm()(x))
                x = x + linen.Dense(64)(linen.gelu(linen.Dense(256)(linen.LayerNorm()(x))))
            return x

    model = Model()
    return model.apply, model.init(jax.random.key(0), x)


def haiku_model(x):
    import haiku as hk
    import jax

    def network(x):
        for _ in range(3):
            u = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.MultiHeadAttention(4, 16, w_init=hk.initializers.VarianceScaling(1.0), model_size=64)(u, u, u)
            u = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.Linear(64)(jax.nn.gelu(hk.Linear(256)(u)))
        return x

    model = hk.without_apply_rng(hk.transform(network))
    return model.apply, model.init(jax.random.key(0), x)


LIBRARIES = {"pytorch": of_pytorch, "timm": of_timm, "x-transformers": of_x_transformers, "jax": of_jax}


def row_of(name: str, make: Callable[[], Any], inputs: Any, recipe: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    with limited(row, SECONDS):
        model = make()
        start = time.perf_counter()
        found = si.audit(model, inputs, recipe=recipe)
        row |= {"seconds": round(time.perf_counter() - start, 2), "passed": found.passed, "verdict": str(found)}
    return row


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or list(LIBRARIES)
    rows = []
    for library in chosen:
        for each in LIBRARIES[library]():
            rows.append(row_of(*each))
            out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            print({key: str(value)[:260] for key, value in rows[-1].items()}, flush=True)
    print(f"{len(rows)} models, {sum('verdict' in row for row in rows)} audited")


if __name__ == "__main__":
    main()
