"""What the textbook's program is measured against: `sdeinfer.fit`, with everything that it does beside sampling."""

import json
import sys
import time

import arviz_stats
import jax
import numpy as np

import sdeinfer as si

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    source, draws = sys.argv[1], int(sys.argv[2])
    stored = dict(np.load(source))
    started = time.perf_counter()
    sizes = {"width": int(stored["width"]), "layers": stored["layers"], "architecture": "transformer"}
    data = si.covariance_dataset(stored["V"], **sizes)
    law = {"law": "limit", "largest_logit": float("inf")}  # with no transition left out, as the textbook has it
    post = si.fit(si.models.full_path, data, **law, chains=4, draws=draws, warmup=draws, key=jax.random.key(1))
    seconds = time.perf_counter() - started
    ess = min(float(arviz_stats.ess(post["posterior"][name])) for name in ("gamma", "tau0", "c_gap"))
    print(json.dumps({"seconds": seconds, "ess": ess}))
