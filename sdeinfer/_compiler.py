"""How much the compiler optimises."""

RUN_ONCE: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
"""Options of `jax.jit` for programs that take longer to compile than to run: half the compilation, a slower run."""
