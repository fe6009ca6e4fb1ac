"""A fit of γ to a few layers of one token by the limit's law, of which all is known by hand."""

import functools

import numpy as np
import xarray as xr
from helpers.internals import used_of, with_used

import sdeinfer as si

GAMMA, WIDTH = 0.4, 64


@functools.cache
def innovations_of_one() -> np.ndarray:
    """y of three networks and three layers: V⁻¹dV √n/2γ, normal by the law with c₊ and c₋ fixed."""
    return np.random.default_rng(0).standard_normal((3, 3))


@functools.cache
def logits() -> dict[str, np.ndarray]:
    """Draws of logit γ."""
    rng = np.random.default_rng(1)
    return {"posterior": rng.normal(0, 0.3, 50), "prior": rng.normal(0, 1, 50)}


def by_hand() -> tuple[np.ndarray, float, float, float]:
    """The scores in logit γ, (1 − γ)(y² − 1); their information; and the sds of prior and posterior."""
    y = innovations_of_one()
    sds = {name: float(x.std()) for name, x in logits().items()}
    return (1 - GAMMA) * (y**2 - 1), y.size * 2 * (1 - GAMMA) ** 2, sds["prior"], sds["posterior"]


def one_token() -> tuple[xr.DataTree, xr.Dataset]:
    """The posterior, and the data."""
    y = innovations_of_one()
    V = np.cumprod(np.concatenate([np.ones((len(y), 1)), 1 + 2 * GAMMA * y / np.sqrt(WIDTH)], axis=1), axis=1)
    data = si.covariance_dataset(V[..., None, None], width=WIDTH, architecture="feedforward")
    sites = ("chain", "draw")
    groups = {name: xr.Dataset({"gamma": (sites, 1 / (1 + np.exp(-x[None])))}) for name, x in logits().items()}
    flat = {"log_prior": {"gamma": (sites, np.zeros((1, 50)))}}
    flat["log_likelihood"] = {"covariance": ((*sites, "network"), np.zeros((1, 50, len(y))))}
    values = {"gamma": GAMMA, "c_plus": 1.0, "c_minus": -1.0}
    groups |= {name: xr.Dataset(x) for name, x in flat.items()} | {
        "layers": xr.Dataset({name: ("network", np.full(len(y), x)) for name, x in values.items()}),
        "observed_data": data[["covariance"]].drop_vars("width"),
        "constant_data": with_used(data, used_of(data))[["used", "width"]].reset_coords("width"),
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = data.attrs | {"model": "full_path", "law": "limit", "identified": "gamma"}
    tree.attrs |= {"fixed_c_gap": 2.0, "fixed_c_mean": 0.0}
    return tree, data
