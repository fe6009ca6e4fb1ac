"""README's script: imports, cold, warm, and with data of another shape; prints what each took as one line of JSON."""

import json
import sys
import time

_started = time.perf_counter()

import jax

import sdeinfer as si

# What the script uses is imported before the clock of its first run starts: see "imports".
used = (si.sample_networks, si.simulate, si.fit, si.check, si.models.full_path)
import arviz_stats  # noqa: F401
import scipy.stats  # noqa: F401

imports = time.perf_counter() - _started
programs: list[str] = []


def heard(event: str, duration: float, **details: str) -> None:
    """Count compiled programs, and those that came from a cache."""
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
        programs.append(details.get("fun_name", ""))


def script(seed: int, *, width: int = 128, depth: int = 16, networks: int = 64) -> float:
    """README's script; how long it took."""
    started = time.perf_counter()
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=4, correlation=0.0, norm=1.6)
    data = si.sample_networks(truth, V0, width=width, depth=depth, networks=networks, key=jax.random.key(seed))
    jax.block_until_ready(si.simulate(truth, V0, [0.0625, 0.125], paths=512, key=jax.random.key(seed + 1)))
    post = si.fit(si.models.full_path, data, key=jax.random.key(seed + 2))
    si.check(post, data).to_frame()
    return time.perf_counter() - started


if __name__ == "__main__":
    if "--cache" in sys.argv:
        si.use_compilation_cache()
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    jax.monitoring.register_event_duration_secs_listener(heard)
    other = {"width": 96, "depth": 12, "networks": 48}
    cold, compiled = script(0), len(programs)
    warm = sorted(script(0) for _ in range(3))[1]
    first, again = script(0, **other), script(0, **other)
    found = {"imports": imports, "cold": cold, "warm": warm, "other_first": first, "other_again": again}
    print(json.dumps(found | {"programs": compiled, "programs_other": len(programs) - compiled}))
