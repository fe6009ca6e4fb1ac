"""Work on several devices: the batch of one large program is divided among them; each chain has its own.

Keys belong to blocks of paths, networks and chains, so results do not depend on the number of devices. With one device
nothing is placed, and the compiled programs are those without this module.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

type Devices = Sequence[Any]
"""JAX devices."""

_DIVIDED = threading.Lock()


def local_devices() -> Devices:
    """The devices of this process; only one inside of `jax.default_device`."""
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.local_devices()
    return jax.local_devices(backend=chosen)[:1] if isinstance(chosen, str) else [chosen]


def on_cpu() -> bool:
    """Whether programs run on a CPU."""
    return local_devices()[0].platform == "cpu"


def devices_for(size: int) -> Devices:
    """As many of the devices as divide a batch of this size into equal parts."""
    devices = local_devices()
    return devices[: next(count for count in range(min(len(devices), size), 0, -1) if size % count == 0)]


def divided[T: PyTree](arrays: T, devices: Devices, *, axis: int = -1) -> T:
    """Arrays whose `axis` is divided equally among the devices; unchanged if there is one device.

    `jax.jit` divides a program by its arguments. A path or a network needs no other, so each device computes what one
    device would; only conditions of loops are exchanged.
    """
    if len(devices) == 1:
        return arrays
    mesh = Mesh(np.asarray(devices), ("batch",))

    def sharding(x: np.ndarray) -> NamedSharding:
        names: list[str | None] = [None] * np.ndim(x)
        names[axis] = "batch"
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.device_put(arrays, jax.tree.map(sharding, arrays))


def launching(devices: Devices) -> contextlib.AbstractContextManager[object]:
    """Hold this from the launch of a divided program to its end: two at a time could each wait for the other."""
    return contextlib.nullcontext() if len(devices) == 1 else _DIVIDED


@eqx.filter_jit
def one_per_device[S: PyTree, T: PyTree](
    function: Callable[[Any, S, Any], T], problem: Any, items: Sequence[S], steps: Array, devices: Devices
) -> list[T]:
    """Call `function(problem, item, steps)` for each of as many items as devices, each on its own device.

    One program is compiled for all devices, in which none waits for another.
    """
    arrays, static = eqx.partition(problem, eqx.is_array)

    def own(arrays: Any, items: Any, steps: Array) -> Any:
        result = function(eqx.combine(arrays, static), jax.tree.map(lambda x: x[0], items), steps)
        return jax.tree.map(lambda x: x[None], result)

    mesh, batch = Mesh(np.asarray(devices), ("batch",)), PartitionSpec("batch")
    run = jax.shard_map(
        own, mesh=mesh, in_specs=(PartitionSpec(), batch, PartitionSpec()), out_specs=batch, check_vma=False
    )
    results = run(arrays, jax.tree.map(lambda *each: jnp.stack(each), *items), steps)
    return [jax.tree.map(lambda x, number=number: x[number], results) for number in range(len(items))]
