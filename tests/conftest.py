"""What the whole suite shares; it runs in double precision, except where a test asks for single.

Most of its time is compilation. Tests run in one process a core (`-n 0` for one process), which share a folder of
compiled programs for the time of the run. Of XLA's work only LLVM's optimisations are left out: that halves the time,
and changes results by rounding. `XLA_FLAGS= pytest` runs the machine code that users run, as do slow tests and
benchmarks.
"""

import functools
import gc
import math
import os
import shutil
import tempfile
from pathlib import Path

import budget
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest

jaxtyping.install_import_hook("sdeinfer", "typechecking.check")

import sdeinfer as si  # noqa: E402
from sdeinfer import _compiler  # noqa: E402

jax.config.update("jax_enable_x64", True)  # noqa: FBT003
os.environ["SDEINFER_NO_CACHE"] = "1"  # commands leave the user's folder alone, and compile as on the first day

MOST_MAPS = 32_000
MOST_WORKERS = 8
"""Each takes some GB of memory."""

LONGEST = ("test_notebooks", "test_latent", "test_cli", "test_readme", "tests/infer", "tests/diagnostics")
"""Where the tests that take longest are; the sort keeps the order of all others."""

LONG_CASES = (
    "test_plain.py::test_the_limit_is_the_dense_normal[attention]",
    "test_plain.py::test_the_limit_is_the_dense_normal[feedforward]",
    "test_plain.py::test_the_limit_is_the_dense_normal[mlp]",
    "test_plain.py::test_a_layer_of_finite_width_is_the_dense_normal[feedforward]",
    "test_gradients.py::test_tangents_are_differences_of_networks[mlp]",
    "test_stopped.py::test_observed_paths_stop_when_and_why_simulated_ones_do[mlp-float32]",
    "test_laws.py::test_one_step_of_the_solver_for_each_layer[4.0-0.2-4e-09]",
    "test_modes.py::test_the_continuum_keeps_its_mass_and_is_the_limit_of_tokens[False]",
    "test_flow.py::test_energy_rises[0.5-True]",
    "test_innovations.py::test_what_breaks_the_law_is_named[switches0-growth-64]",
    "test_innovations.py::test_what_breaks_the_law_is_named[switches3-growth-24]",
    "test_bridge.py::test_gradients_are_finite_and_right[start0]",
    "test_bridge.py::test_one_layer_by_the_change_of_variables[4-8]",
    "test_eigen.py::test_decomposes_what_it_is_given[8-float64]",
    "test_gradients.py::test_gradients_are_products_with_the_jacobian[causal transformer]",
    "test_statistics.py::test_statistics_lose_nothing_wherever_the_prior_goes[transformer, 4 heads, W_O, r = 4]",
    "test_baselines.py::test_switches_are_gains_and_a_temperature_of_shaped_attention[{}]",
    "test_stopped.py::test_paths_stop_for_every_reason_that_there_is[mlp-float32]",
    "test_stopped.py::test_paths_stop_for_every_reason_that_there_is[narrow attention-float32]",
    "test_widths.py::test_moments_of_one_layer_tend_to_the_limit[causal attention]",
    "test_gradients.py::test_one_token_has_its_exact_law[transformer]",
    "test_splitting.py::test_paths_are_finite_covariances_at_any_step[equal-float64]",
    "test_splitting.py::test_paths_are_finite_covariances_at_any_step[equal-float32]",
    "test_splitting.py::test_paths_are_finite_covariances_at_any_step[singular-float32]",
    "test_gradients.py::test_gradients_are_products_with_the_jacobian[transformer]",
    "test_innovations.py::test_what_breaks_the_law_is_named[switches2-growth-24]",
    "test_plain.py::test_sufficient_statistics_are_a_compression_of_it[a causal mask]",
    "test_chain.py::test_many_tokens_have_the_law_of_their_weights[mlp]",
    "test_chain.py::test_linear_layers_have_their_exact_moments[weights-heads]",
    "test_patterns.py::test_paths_stay_in_the_cone[full rank]",
    "test_eigen.py::test_equal_zero_and_nearly_equal_eigenvalues[8]",
    "test_widths.py::test_moments_of_one_layer_tend_to_the_limit[attention]",
    "test_stopped.py::test_paths_are_inside_until_they_stop_and_stay_as_they_were[mlp-float32]",
    "test_stopped.py::test_paths_are_inside_until_they_stop_and_stay_as_they_were[narrow attention-float32]",
    "test_tangents.py::test_paths_stay_in_the_cone[full rank-transformer-float32]",
    "test_plain.py::test_a_layer_of_finite_width_is_the_dense_normal[transformer]",
    "test_plain.py::test_a_layer_of_finite_width_is_the_dense_normal[stack]",
    "test_adjustment.py::test_the_mode_is_that_of_the_exact_law[1]",
    "test_stopped.py::test_paths_are_those_of_simulate_until_they_stop[mlp-float32]",
    "test_stopped.py::test_paths_are_those_of_simulate_until_they_stop[narrow attention-float32]",
    "test_gradients.py::test_tangents_are_differences_of_networks[transformer]",
    "test_cone.py::test_explosions_are_of_the_sde_and_not_of_the_step[0.5-0.5-0.2]",
    "test_chain.py::test_linear_layers_have_their_exact_moments[weights-projection]",
    "test_batched.py::test_gradients_are_finite_in_a_batch_that_holds_singular_matrices[17]",
    "test_pattern_order.py::test_derivatives_are_those_of_differences[causal]",
    "test_statistics.py::test_statistics_lose_nothing_wherever_the_prior_goes[feedforward]",
    "test_splitting.py::test_the_flow_of_attentions_noise_has_local_errors_of_the_third_order[causal]",
    "test_paths.py::test_diffrax_alone_solves_one_path[transformer]",
    "test_patterns.py::test_paths_stay_in_the_cone[rank one]",
    "test_splitting.py::test_the_linear_flow_keeps_the_mean_and_scales_one_token_exactly[6]",
    "test_paths.py::test_paths_are_those_of_the_naive_twin[18]",
    "test_simulate.py::test_relu_networks_cannot_explode_however_deep[mlp]",
    "test_flow.py::test_energy_rises[4.0-False]",
    "test_stopped.py::test_paths_stop_for_every_reason_that_there_is[mild-float64]",
    "test_laws.py::test_without_a_gap_the_mean_is_constant_and_the_log_volume_normal[ff]",
    "test_stopped.py::test_a_v0_that_cannot_go_on_stops_at_time_zero[above]",
    "test_simulate.py::test_paths_stay_covariances_at_steps_that_euler_would_not_survive[feedforward-8-float32]",
    "test_modes.py::test_equiangular_tokens_follow_one_equation[2--0.5-True]",
    "test_modes.py::test_equiangular_tokens_follow_one_equation[5-0.0-False]",
    "test_tangents.py::test_paths_stay_in_the_cone[rank one-transformer-float32]",
    "test_chain.py::test_noise_of_heads_is_that_of_their_limit[False]",
    "test_bridge.py::test_outputs_have_the_density_of_their_covariance[6]",
    "test_chain.py::test_equal_tokens_stay_equal_to_the_last_bit[transformer, H = 4-float32]",
    "test_models.py::test_numpyros_predictive_samples_what_is_hidden[limit]",
    "test_paths.py::test_singular_starts_stay_covariances_of_the_rank_that_the_theory_says[transformer-float32]",
    "test_flow.py::test_rotations_and_permutations_commute_with_the_flow[True]",
    "test_sample.py::test_networks_do_not_depend_on_the_batches_they_come_in[chain-TOGETHER-1]",
    "test_simulate.py::test_a_scan_of_the_steps_is_diffraxs_loop[130]",
    "test_plain.py::test_a_layer_of_finite_width_is_the_dense_normal[mlp]",
    "test_tangents.py::test_a_step_is_that_of_two_prompts_that_draw_near[mask]",
    "test_plain.py::test_the_limit_is_the_dense_normal[transformer]",
    "test_models.py::test_a_program_of_a_user_has_the_density_of_the_packages_model[finite-width]",
    "test_simulate.py::test_known_and_traced_arguments_give_the_same_paths[part of a block]",
    "test_simulate.py::test_a_scan_of_the_steps_is_diffraxs_loop[65]",
    "test_simulate.py::test_a_scan_of_the_steps_is_diffraxs_loop[64]",
    "test_projected_normal.py::test_derivatives_of_the_moment[1]",
    "test_paths.py::test_normals_take_the_type_of_v0[float32]",
    "test_models.py::test_networks_are_sampled_from_their_first_covariances[limit]",
    "test_projected_normal.py::test_derivatives_of_the_moment[39]",
    "test_laws.py::test_one_small_step_has_the_generators_mean_and_covariance[transformer]",
    "test_models.py::test_one_layer_for_each_network_has_the_density_of_one_for_all_where_they_are_equal[finite-width]",
    "test_patterns.py::test_one_small_step_has_the_generators_mean_and_covariance[causal stack]",
    "test_modes.py::test_tokens_on_the_circle_grow_at_the_rate_of_their_mode[2.0]",
    "test_bridge.py::test_one_token_by_quadrature[1]",
    "test_bridge.py::test_one_layer_by_the_change_of_variables[2-2]",
    "test_forward.py::test_causal_attention_is_eq_9_over_the_tokens_so_far[2]",
    "test_chain.py::test_wishart_factors_of_every_rank[0]",
    "test_laws.py::test_noise_of_each_layer[NoisyLayers]",
    "test_models.py::test_sites_of_each_network_have_modes_of_their_own[finite-width]",
    "test_criteria.py::test_derivatives_are_those_of_the_law[below]",
    "test_bridge.py::test_one_layer_by_the_change_of_variables[2-16]",
    "test_first_clusters.py::test_random_tokens_have_the_peaks_of_a_normal_potential[50.0]",
    "test_criteria.py::test_derivatives_are_those_of_the_law[quantile]",
    "test_patterns.py::test_one_small_step_has_the_generators_mean_and_covariance[mask]",
    "test_paths.py::test_a_traced_v0_that_is_no_covariance_raises[jit]",
    "test_widths.py::test_moments_of_linear_layers_are_exact_at_every_width[transformer]",
    "test_stopped.py::test_paths_stop_for_every_reason_that_there_is[one token-float64]",
    "test_limits.py::test_drift_and_diffusion_are_equivariant_under_permutations_of_the_tokens[transformer]",
    "test_pattern_order.py::test_jax_agrees_with_numpy_and_has_derivatives[causal]",
    "test_sample.py::test_every_network_starts_at_exactly_v0[stack]",
    "test_stopped.py::test_a_path_that_stops_before_its_first_step_has_the_derivative_of_standing_still[10.0-float32]",
    "test_paths.py::test_two_tokens_at_an_end_are_turned_by_the_relu_alone[-1.0-float64]",
    "test_paths.py::test_paths_are_those_of_the_naive_twin[3]",
    "test_patterns.py::test_a_step_is_that_of_the_naive_twin[causal attention-m4]",
    "test_laws.py::test_one_small_step_has_the_generators_mean_and_covariance[stack]",
    "test_projected_normal.py::test_density_is_the_integral_over_radii[0.001-2]",
    "test_splitting.py::test_the_linear_flow_keeps_the_mean_and_scales_one_token_exactly[3]",
)
"""Cases of 1 to 14 s whose tests have other cases; they are marked `long`."""

COMPILED = pytest.StashKey[str]()

LAYERS = {
    "transformer": lambda: si.ShapedTransformer(gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5),
    "attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8),
    "feedforward": lambda: si.ResidualFeedForward(gamma=0.6, c_plus=0.5, c_minus=-1.0),
    "mlp": lambda: si.ShapedMLP(c_plus=0.2, c_minus=-1.2),
    "stack": lambda: si.Stack(
        (
            si.ShapedAttention(gamma=0.4, tau0=1.1),
            si.ResidualFeedForward(gamma=0.9, c_plus=1.0, c_minus=-0.5),
        )
    ),
}
"""One of each architecture: the shared property tests run over all of them."""


def halves(tokens: int) -> tuple[int, ...]:
    return (tokens,) if tokens == 1 else (tokens // 2, tokens - tokens // 2)


def any_mask(tokens: int) -> si.Pattern:
    """A mask without structure, in which not every token attends to itself."""
    if tokens == 2:
        return si.Pattern.of_mask([[0, 1], [1, 1]])
    chosen = np.random.default_rng(tokens).random((tokens, tokens)) < 0.6
    return si.Pattern.of_mask(chosen | np.eye(tokens, k=-1, dtype=bool) | np.eye(tokens, k=tokens - 1, dtype=bool))


PATTERNS = {
    "causal": lambda tokens: si.CAUSAL,
    "prompts": lambda tokens: si.Pattern(prompts=halves(tokens)),
    "causal prompts": lambda tokens: si.Pattern(causal=True, prompts=halves(tokens)),
    "mask": lambda tokens: any_mask(tokens) if tokens > 1 else si.Pattern(),
}
"""Attention patterns of a number of tokens."""

CAUSAL = {
    "causal attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8, pattern=si.CAUSAL),
    "causal transformer": lambda: si.ShapedTransformer(
        gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5, heads=2, pattern=si.CAUSAL
    ),
    "causal stack": lambda: si.Stack(
        (si.ShapedMLP(c_plus=0.2, c_minus=-1.2), si.ShapedAttention(gamma=0.6, tau0=0.9, pattern=si.CAUSAL))
    ),
}
"""With a causal mask; tokens are not exchangeable then."""


def masked_layer_of(name: str, tokens: int) -> si.layers.AbstractLayer:
    """One of `CAUSAL`, or a Transformer with one of `PATTERNS`."""
    if name in CAUSAL:
        return CAUSAL[name]()
    return si.ShapedTransformer(gamma=0.6, tau0=0.7, c_plus=0.4, c_minus=-1.1, pattern=PATTERNS[name](tokens))


@pytest.fixture(params=[*CAUSAL, *list(PATTERNS)[1:]])
def masked_layer(request):
    """Maps a number of tokens to a layer whose attention has a pattern."""
    return functools.partial(masked_layer_of, request.param)


@pytest.fixture(params=LAYERS)
def layer(request) -> si.layers.AbstractLayer:
    return LAYERS[request.param]()


def takes_its_time(config) -> bool:
    """Whether slow tests or benchmarks were asked for."""
    asked = config.option.markexpr
    return any(mark in asked and f"not {mark}" not in asked for mark in ("slow", "benchmark"))


def pytest_xdist_auto_num_workers(config) -> int:
    """`-n auto`: a process a core; none where output is not captured, or for slow tests and benchmarks."""
    alone = config.option.capture == "no" or takes_its_time(config)
    return 0 if alone else min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def pytest_configure(config):
    """Before the workers start, which inherit the environment."""
    if not takes_its_time(config):
        # As for all other programs; the modules that use it are not imported yet.
        _compiler.BALANCED.update(_compiler.RUN_ONCE)
    if hasattr(config, "workerinput"):
        return
    # One thread of BLAS a process: more would be in each other's way.
    if config.option.numprocesses:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not takes_its_time(config):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = config.stash[COMPILED] = tempfile.mkdtemp(prefix="sdeinfer-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        jax.config.update("jax_compilation_cache_dir", folder)
    for name, everything in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):
        os.environ[f"JAX_PERSISTENT_CACHE_{name.upper()}"] = str(everything)
        jax.config.update(f"jax_persistent_cache_{name}", everything)


def pytest_collection_finish():
    """Look for garbage less often, and not among modules: traced programs are many objects, and hardly any garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the long cases; refuse tests without a default case; and start with what takes longest."""
    for item in items:
        if item.nodeid.endswith(LONG_CASES):
            item.add_marker(pytest.mark.long)
    if not any("[" in argument for argument in config.args):  # cases that were named one by one are not all cases
        without = tests_without_a_default_case(items)
        if without:
            raise pytest.UsageError("no case of these tests runs by default:\n" + "\n".join(without))
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


KINDS = ("benchmark", "torch", "slow", "docs", "long")
"""Markers of tests that do not run by default; the first of them that a test has is its kind in the budget."""

STUDIES = {"benchmark", "torch", "slow", "docs"}
"""Markers that a whole test may have: what it is about has a default test elsewhere."""


def kind_of(item) -> str:
    """The kind of a test in the budget."""
    return next((kind for kind in KINDS if item.get_closest_marker(kind)), "default")


def tests_without_a_default_case(items) -> list[str]:
    """The tests none of whose cases runs by default, other than studies."""
    default, others = set(), {}
    for item in items:
        name = item.nodeid.split("[")[0]
        of_all_cases = [*getattr(item.function, "pytestmark", ()), *item.parent.iter_markers()]
        if kind_of(item) == "default":
            default.add(name)
        elif not STUDIES & {mark.name for mark in of_all_cases}:
            others[name] = None
    return [name for name in others if name not in default]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Comparisons are counted by the kind of test that makes them."""
    budget.begin(kind_of(item))
    return (yield)


def pytest_unconfigure(config):
    """Remove what was compiled."""
    if COMPILED in config.stash:
        shutil.rmtree(config.stash[COMPILED], ignore_errors=True)


def pytest_testnodedown(node):
    """Add up what the workers have spent."""
    budget.spend(getattr(node, "workeroutput", {}).get("comparisons", {}))


def pytest_sessionfinish(session):
    """Fail where more comparisons were made than were declared, by all processes together."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["comparisons"] = budget.spent()
    elif budget.overspent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say what was spent of the budget for false failures, where it was exceeded or somebody asks."""
    if budget.overspent() or terminalreporter.config.option.verbose > 0:
        spent = ", ".join(f"{count} of {budget.DECLARED[kind]} {kind}" for kind, count in budget.spent().items())
        terminalreporter.write_line(f"budget: statistical comparisons made, of those declared: {spent or 'none'}")


@functools.cache
def random_covariance(tokens: int, seed: int = 0):
    """A well-conditioned covariance with unequal norms."""
    with jax.ensure_compile_time_eval():  # also where a traced function asks first
        X = np.asarray(jr.normal(jr.key(seed), (tokens, tokens + 3)))
        return jnp.asarray(X @ X.T / (tokens + 3))


def matrix_of(move, *shape: int, dtype=float):
    """A linear map from normals of this shape to symmetric matrices, as the matrix of their packed entries."""
    normals = jnp.eye(math.prod(shape), dtype=dtype).reshape(-1, *shape)
    return si.covariance.vech(jax.vmap(move)(normals)).T


def root_of(diffusion):
    """Σ^{1/2} as a matrix."""
    return matrix_of(diffusion.sample, len(diffusion.std), dtype=diffusion.std.dtype)


@pytest.fixture(params=range(1, 7), ids=lambda m: f"m{m}")
def V(request):
    return random_covariance(request.param, seed=request.param)


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_forgotten():
    """XLA maps memory for every compiled program, and Linux allows a process 65,530 maps: beyond, XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


WARMUP = 300
"""Of the fits in the suite: its length is compiled in, so that fits of one shape and one warmup share a sampler."""


@pytest.fixture
def unchecked():
    """For tests of what the package itself says of bad input, and of where its warnings point."""
    jaxtyping.config.update("jaxtyping_disable", True)  # noqa: FBT003
    yield
    jaxtyping.config.update("jaxtyping_disable", False)  # noqa: FBT003


@pytest.fixture
def key():
    return jr.key(20230630)


@pytest.fixture(scope="session")
def networks():
    """A small data set of finite Transformers with known parameters."""
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.4)
    return si.sample_networks(truth, V0, width=96, depth=10, networks=24, key=jr.key(1))


@pytest.fixture(scope="session")
def fitted(networks):
    """A short fit of them."""
    return si.fit(si.models.full_path, networks, chains=2, draws=400, warmup=WARMUP, predictions=20, key=jr.key(3))


@pytest.fixture(scope="session")
def tuned():
    """A feed-forward layer tuned for a constraint of each kind, of which the first is active."""
    of = si.criteria
    constraints = [
        of.probability(of.NormFactor(), below=2) >= 0.95,
        of.probability(of.LogNorm(1), above=0.5) <= 0.3,
        of.quantile(of.LogNorm(1), 0.9) <= 30,
        of.spread(of.LogNorm(1)) <= 5,
        of.expectation(of.NormFactor()) <= 300,
    ]
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    sizes = {"width": 64, "depth": 32, "paths": 256, "step": 0.1, "key": jr.key(0)}
    return si.tune("feedforward", V0, maximise="gamma", subject_to=constraints, fixed={"c_gap": 1.0}, **sizes)
