"""How much the compiler optimises: options of `jax.jit`."""

RUN_ONCE: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
"""For programs that take longer to compile than to run: half the compilation, but a run several times slower."""

BALANCED: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 1}
"""For the largest programs: three quarters of the compilation, and a run as fast."""
