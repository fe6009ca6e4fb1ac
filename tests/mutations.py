"""Coefficients that are wrong by 5 % or so, one at a time: the default tests must fail for each.

    uv run python tests/mutations.py               # the tests beside each mutation, then all default tests
    uv run python tests/mutations.py relu chain    # those whose name contains one of these words
    uv run python tests/mutations.py --rooms       # only the tests that are named beside a mutation

Each is made in a copy of the working tree, in a process that is forked from one which has loaded JAX and ArviZ. The
table says which tests failed; the exit code is 1 if none did for some mutation. The file is long because it is one
table, a line for each mutation.
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SHOWN = 2
"""Failing tests after which a run stops."""

LIBRARIES = "jax diffrax optimistix numpyro.infer arviz_stats matplotlib.pyplot scipy.stats xarray pytest"
"""What every run needs and no mutation changes: loaded once."""


class Mutation(NamedTuple):
    """A coefficient, as it is in a file of the package and as it becomes; and the tests that are run first."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LIMIT, NEXT, PATTERN = "terms/_attention.py", "layers/_next_order.py", "layers/_pattern_order.py"
ATTENTION, FEEDFORWARD, FINITE = (f"layers/{name}.py" for name in ("_attention", "_feedforward", "_finite_width"))
WISHART, RELU, SANDWICH = "layers/_wishart.py", "terms/_relu.py", "infer/_sandwich.py"
LIMITS = "tests/layers/test_limits.py tests/covariance/test_diffusion.py"
ORDERS = "tests/layers/test_finite_width.py tests/layers/test_next_order.py tests/layers/test_pattern_order.py"
CHAIN = "tests/networks/test_chain.py tests/layers/test_widths.py tests/layers/test_forward.py"
SCORES = "tests/infer/test_sandwich.py tests/likelihood/test_adjustment.py"
TODAY = "tests/blocks/test_blocks_of_today.py::test_moments_are_those_of_plain_sampling_of_the_chain_and_of_weights"
SOLVE = "tests/solve/test_splitting.py tests/solve/test_simulate.py tests/solve/test_laws.py"

MUTATIONS = (
    # The drift.
    Mutation("drift: attention, V ∘ T", LIMIT, "return V * total(total(V * centre(V)))", "return 1.05 * V * total(total(V * centre(V)))", LIMITS),
    Mutation("drift: attention, v sᵀV", LIMIT, "(outer + transpose(outer)) / (2 * tokens)", "1.05 * (outer + transpose(outer)) / (2 * tokens)", LIMITS),
    Mutation("drift: attention, s", LIMIT, "return v - row * 2 +", "return v - row * 2.1 +", LIMITS),
    Mutation("drift: attention with a pattern, V ∘ T", LIMIT, "return V * overlap(pattern", "return 1.05 * V * overlap(pattern", LIMITS),
    Mutation("drift: attention with a pattern, v s V", LIMIT, "between) + (outer + transpose(outer)) / 2", "between) + 1.05 * (outer + transpose(outer)) / 2", LIMITS),
    Mutation("drift: attention, θ₁", ATTENTION, "attention_drift=variance * coldness**2,", "attention_drift=1.05 * variance * coldness**2,", LIMITS),
    Mutation("drift: ReLU", RELU, "relu_alignment(rho) * scale, 0.0) / (2 * math.pi)", "relu_alignment(rho) * scale, 0.0) / (1.9 * math.pi)", LIMITS),
    Mutation("drift: feed-forward, θ₂", FEEDFORWARD, "variance * (self.c_plus - self.c_minus) ** 2", "1.05 * variance * (self.c_plus - self.c_minus) ** 2", LIMITS),
    Mutation("drift: MLP, θ₂", FEEDFORWARD, "Limit(relu_drift=(self.c_plus - self.c_minus) ** 2", "Limit(relu_drift=1.05 * (self.c_plus - self.c_minus) ** 2", LIMITS),
    # The noise.
    Mutation("noise: attention, a", ATTENTION, "else 2 - variance)", "else 2.1 - variance)", LIMITS),
    Mutation("noise: attention with W_O, a", ATTENTION, "(2 if self.output_projection else", "(2.1 if self.output_projection else", LIMITS),
    Mutation("noise: feed-forward, a", FEEDFORWARD, "variance * (2 - variance * (1 - 1 / self.expansion))", "1.05 * variance * (2 - variance * (1 - 1 / self.expansion))", LIMITS),
    Mutation("noise: MLP, a", FEEDFORWARD, "0 * self.c_plus + 1)", "0 * self.c_plus + 1.05)", LIMITS),
    Mutation("noise: κ²", ATTENTION, "attention_noise=(variance * coldness) ** 2", "attention_noise=1.05 * (variance * coldness) ** 2", LIMITS),
    Mutation("noise: 𝒜 in spectral coordinates", "covariance/_diffusion.py", "self.delta[..., columns] ** 2) / self.tokens**2", "self.delta[..., columns] ** 2) / (0.95 * self.tokens**2)", "tests/covariance/test_diffusion.py"),
    # The solver.
    Mutation("solver: attention's drift, first term", LIMIT, "else (c.drift - c.noise) / 2 * parts", "else (1.05 * c.drift - c.noise) / 2 * parts", SOLVE),
    Mutation("solver: attention's drift, second term", LIMIT, "return self.v[:, None] * moved / 2", "return self.v[:, None] * moved / 1.9", SOLVE),
    Mutation("solver: attention's kernel", LIMIT, "return strength * V * overlap", "return 1.05 * strength * V * overlap", SOLVE),
    Mutation("solver: attention's kernel of tangents", LIMIT, "return strength * (Kernel", "return 1.05 * strength * (Kernel", "tests/solve/test_tangents.py"),
    Mutation("solver: ReLU", RELU, "rate * (V + 2 * relu_drift(V))", "rate * (V + 2.1 * relu_drift(V))", SOLVE),
    Mutation("solver: ReLU of tangents", RELU, "rate * (S + 2 * joint", "rate * (S + 2.1 * joint", "tests/solve/test_tangents.py"),
    Mutation("solver: attention's noise", "terms/_attention_noise.py", "E, F, identity = scale * matmul(G, K), scale", "E, F, identity = 1.05 * scale * matmul(G, K), scale", SOLVE),
    Mutation("solver: linear noise", "terms/_linear.py", "safe_sqrt(a / 2), identity_like(G)", "safe_sqrt(a / 1.9), identity_like(G)", SOLVE),
    # The next order in 1/n: functions of V.
    Mutation("next order: B₁′, s", NEXT, "outer + outer.mT + second / (4 * tokens**2) + third", "1.05 * (outer + outer.mT) + second / (4 * tokens**2) + third", ORDERS),
    Mutation("next order: B₁′, products", NEXT, "second / (4 * tokens**2) + third", "second / (4 * tokens**2) + 1.05 * third", ORDERS),
    Mutation("next order: G, var T₂", NEXT, "return (second + 2 * first_third) / (1 + equal)", "return (1.05 * second + 2 * first_third) / (1 + equal)", ORDERS),
    Mutation("next order: G, cov(T₁, T₃)", NEXT, "return (second + 2 * first_third) / (1 + equal)", "return (second + 2.1 * first_third) / (1 + equal)", ORDERS),
    Mutation("next order: B₁′ with a pattern", PATTERN, "return fourth + fourth.mT + second + third + third.mT", "return fourth + fourth.mT + 1.05 * second + third + third.mT", ORDERS),
    Mutation("next order: G with a pattern", PATTERN, "return variance + 2 * (third + _inner(along, D)), 4 * repeat", "return variance + 2.1 * (third + _inner(along, D)), 4 * repeat", ORDERS),
    Mutation("next order: ½𝒜:∇²B₂", PATTERN, "change / (4 * math.pi *", "change / (3.8 * math.pi *", ORDERS),
    Mutation("next order: DB₂", NEXT, "between.sine * between.ratio / 2", "between.sine * between.ratio / 1.9", ORDERS),
    Mutation("next order: F of hidden units", NEXT, "mixed = tokens + 2 * products", "mixed = tokens + 2.1 * products", ORDERS),
    Mutation("next order: F of tokens", NEXT, "tokens = squares + squares.mT + 2 * products", "tokens = 1.05 * (squares + squares.mT) + 2 * products", ORDERS),
    Mutation("next order: response of a ReLU", NEXT, "response = products / (4 * (1 + equal)) - 1 / 4", "response = products / (3.8 * (1 + equal)) - 1 / 4", ORDERS),
    # The next order in 1/n: coefficients.
    Mutation("next order: attention, growth by B₁′", ATTENTION, "variance * x**2 *", "1.2 * variance * x**2 *", ORDERS),
    Mutation("next order: stack, growth by B₁′", "layers/_finite_width.py", "moved * self.attention_drift_next", "1.2 * moved * self.attention_drift_next", ORDERS),
    Mutation("next order: growth of a pattern", PATTERN, "growth, growth_next = (4 * _inner(", "growth, growth_next = (4.2 * _inner(", ORDERS),
    Mutation("range: noise of tokens near a line", "infer/_range.py", "(16 / 3 * share)", "(14 / 3 * share)", "tests/infer/test_range.py::test_tokens_near_a_line_leave_it_by_the_fourth_power_of_a_normal"),
    Mutation("range: width of tokens near a line", "infer/_measures.py", "np.asarray(width) ** 0.25", "np.asarray(width) ** 0.3", "tests/infer/test_range.py::test_tokens_near_a_line_leave_it_by_the_fourth_power_of_a_normal"),
    Mutation("groups: information of the prior", "infer/_grouped.py", "** 2 - 4.0, 0.0)", "** 2 - 9.0, 0.0)", "tests/models/test_hierarchical.py::test_estimates_are_the_modes_of_groups_alone"),
    Mutation("skewness: growth of a layer", "diagnostics/_assumptions.py", "- 3 * (path.tokens + 1) * Z", "- 2.8 * (path.tokens + 1) * Z", "tests/diagnostics/test_skewness.py"),
    Mutation("skewness: size", "diagnostics/_assumptions.py", "abs(difference / expected), 2", "abs(difference / (3 * expected)), 2", "tests/diagnostics/test_skewness.py"),
    Mutation("mode: length of the first step", "infer/_mode.py", "scale = max(1.0, float", "scale = min(1.0, float", "tests/infer/test_sandwich.py::test_the_mode_is_found_where_the_potential_has_no_slope_far_from_it"),
    Mutation("next order: attention, growth", ATTENTION, "attention_growth=variance * x *", "attention_growth=1.05 * variance * x *", ORDERS),
    Mutation("next order: attention, B₁′", ATTENTION, "attention_drift_next=limit.attention_drift * x", "attention_drift_next=1.05 * limit.attention_drift * x", ORDERS),
    Mutation("next order: attention, G", ATTENTION, "attention_next=limit.attention_noise * x", "attention_next=1.05 * limit.attention_noise * x", ORDERS),
    Mutation("next order: attention, repeated noise", ATTENTION, "repeat = variance**2 * x", "repeat = 1.05 * variance**2 * x", ORDERS),
    Mutation("next order: feed-forward, kink", "layers/_feedforward.py", "return half**2 * reciprocal(mean**2 + half**2)", "return 1.05 * half**2 * reciprocal(mean**2 + half**2)", ORDERS),
    Mutation("next order: feed-forward, F", FEEDFORWARD, "relu_hidden=q * variance**2", "relu_hidden=1.05 * q * variance**2", ORDERS),
    Mutation("next order: feed-forward, F₂", FEEDFORWARD, "relu_hidden_square=(q", "relu_hidden_square=1.05 * (q", ORDERS),
    Mutation("next order: feed-forward, repeated noise", FEEDFORWARD, "linear_repeat=variance**2", "linear_repeat=1.05 * variance**2", ORDERS),
    Mutation("next order: MLP, F", FEEDFORWARD, "relu_tokens=q", "relu_tokens=1.05 * q", ORDERS),
    Mutation("next order: stack, DB₂[B₁]", FINITE, "drift_along=second.relu_drift * first.attention_drift * h", "drift_along=1.05 * second.relu_drift * first.attention_drift * h", ORDERS),
    Mutation("next order: stack, response", FINITE, '"relu_response": 2 * second', '"relu_response": 2.1 * second', ORDERS),
    Mutation("next order: stack, noise of the first layer", FINITE, "linear_repeat=moved * first.linear_noise", "linear_repeat=1.05 * moved * first.linear_noise", ORDERS),
    # The likelihood.
    Mutation("likelihood: variance of terms", "likelihood/_terms.py", "increments=moved[0] / step", "increments=moved[0] / (0.95 * step)", "tests/likelihood/test_transitions.py"),
    Mutation("likelihood: fit of G", "likelihood/_statistics.py", "next_order = path.next_order[0][:, None] +", "next_order = 1.05 * path.next_order[0][:, None] +", "tests/likelihood/test_statistics.py"),
    Mutation("likelihood: latent layers, variance", "likelihood/_layer_step.py", "w = wanted / power**2", "w = 1.05 * wanted / power**2", "tests/likelihood/test_layer_step.py"),
    # The adjustment.
    Mutation("adjustment: dispersion", SANDWICH, "return (of_scatter + 1e-3)", "return (1.05 * of_scatter + 1e-3)", SCORES),
    Mutation("adjustment: C", SANDWICH, "return inverse @ shrunk @ root", "return 1.05 * inverse @ shrunk @ root", SCORES),
    Mutation("adjustment: C, scatter beside the priors", SANDWICH, "_roots(inverse @ (scatter + priors) @ inverse)", "_roots(inverse @ (1.05 * scatter + priors) @ inverse)", SCORES),
    Mutation("adjustment: scatter of the score", SANDWICH, "parts * weighted[part::parts].T @ weighted[part::parts]", "1.05 * parts * weighted[part::parts].T @ weighted[part::parts]", SCORES),
    Mutation("adjustment: omitted order", SANDWICH, "omitted = largest *", "omitted = 1.05 * largest *", SCORES),
    Mutation("adjustment: how C moves parameters", "likelihood/_path.py", "@ matrix.T).T)", "@ (1.05 * matrix.T)).T)", SCORES),
    # Finite networks, with weights and without.
    Mutation("chain: residual scale", WISHART, "scale = gamma / xp.sqrt", "scale = 1.05 * gamma / xp.sqrt", CHAIN),
    Mutation("chain: residual in the other directions", WISHART, "gram(scale * matmul(F, far))", "gram(1.05 * scale * matmul(F, far))", CHAIN),
    Mutation("chain: temperature of the logits", ATTENTION, "tau = self.tau0 * xp.sqrt", "tau = 1.05 * self.tau0 * xp.sqrt", CHAIN),
    Mutation("chain: degrees of freedom", WISHART, "xp.asarray(nu) - np.arange(tokens)", "xp.asarray(nu) - 2 * np.arange(tokens)", CHAIN),
    Mutation("chain: hidden units", FEEDFORWARD, "/ units.astype(V.dtype)", "/ (1.05 * units.astype(V.dtype))", CHAIN),
    Mutation("chain: MLP", FEEDFORWARD, "drawn.chi[0])) / xp.sqrt(n))", "drawn.chi[0])) / xp.sqrt(1.05 * n))", CHAIN),
    Mutation("networks: temperature of the logits", ATTENTION, "tau = self.tau0 * math.sqrt", "tau = 1.05 * self.tau0 * math.sqrt", CHAIN),
    Mutation("networks: He constant", "layers/_feedforward.py", "xp.sqrt(2 * (s_plus**2 + s_minus**2))", "xp.sqrt(2.1 * (s_plus**2 + s_minus**2))", CHAIN),
    Mutation("networks: shortcut", "layers/_base.py", "return engine(gamma).sqrt((1 - gamma)", "return 1.05 * engine(gamma).sqrt((1 - gamma)", CHAIN),
    # Every room: factors, exponents, signs, missing terms, off by one; chosen from the formulas, before the tests were read.
    Mutation("blocks: noise of the n columns", "blocks/_law.py", "fourth_moments(identity[None]) / width", "1.5 * fourth_moments(identity[None]) / width", "tests/blocks/test_law.py::test_standardised_increments_of_networks_are_standard"),
    Mutation("blocks: chain, mean over heads", "blocks/_attention.py", "S / (self.heads *", "S / (1.03 * self.heads *", "tests/blocks/test_law.py::test_moments_are_those_of_plain_sampling_and_of_the_chain"),
    Mutation("blocks: volume of the logarithm", "blocks/_law.py", "/ 24 - (m + 1)", "/ 20 - (m + 1)", "tests/blocks/test_law.py::test_volume_is_that_of_the_matrix_exponential"),
    Mutation("likelihood: fit of outputs", "likelihood/_bridge.py", "(fit + log_det", "(1.05 * fit + log_det", "tests/likelihood/test_bridge.py::test_outputs_have_the_density_of_their_covariance"),
    Mutation("tuning: moves to a width", "tuning/_search.py", "= moves + problem.offset", "= 0.8 * moves + problem.offset", "tests/tuning/test_problem.py::test_criteria_of_paths_are_moved_to_those_of_chains"),
    Mutation("check: noise of one layer", "diagnostics/_assumptions.py", "total.sum() / count.sum()", "total.sum() / (2 * count.sum())", "tests/diagnostics/test_one_layer.py"),
    Mutation("consequences: curvature of priors", "diagnostics/_consequences.py", "precision = _precision_besides", "precision = 1.2 * _precision_besides", "tests/diagnostics/test_consequences.py::test_one_token_by_hand"),
    Mutation("blocks: mean of the logarithm", "blocks/_law.py", ".sum(-1) / 2, covariance)", ".sum(-1) / 1.9, covariance)", "tests/blocks/test_law.py::test_moments_of_the_logarithm_by_draws_are_the_leading_order_for_small_fluctuations"),
    Mutation("blocks: moments of values, heads of a group", "blocks/_attention_parts.py", "(shared**2 * self.size)", "(shared * self.size)", "tests/blocks/test_law.py::test_moments_are_those_of_plain_sampling_and_of_the_chain"),
    Mutation("blocks: chain, angles of rotations", "blocks/_logits.py", "(-2 * plane / jnp", "(-plane / jnp", "tests/blocks/test_law.py::test_moments_are_those_of_plain_sampling_and_of_the_chain"),
    Mutation("blocks: moments of gates", "blocks/_mlp.py", "vech(P), fourth_moments(P)", "vech(P), 1.1 * fourth_moments(P)", "tests/blocks/test_law.py::test_identity_has_the_moments_of_normals"),
    Mutation("blocks: degrees of the t law", "blocks/_information.py", "(4 * ratio - 2)", "(4.4 * ratio - 2)", "tests/blocks/test_information.py::test_a_block_has_the_information_of_the_scatter_of_its_scores"),
    Mutation("criteria: error of a spread", "criteria/_criteria.py", "/ (2 * sd) if sd", "/ (1.8 * sd) if sd", "tests/criteria/test_criteria.py::test_errors_are_those_of_large_samples"),
    Mutation("criteria: bandwidth", "criteria/_criteria.py", "(high - low) / 1.349", "(high - low) / 1.25", "tests/criteria/test_criteria.py::test_smooth_probabilities_take_the_quartiles_for_the_scale_of_heavy_tails"),
    Mutation("criteria: gradients of queries", "criteria/_gradients.py", "(variance / tau0**2 *", "(variance / tau0 *", "tests/criteria/test_gradients.py"),
    Mutation("criteria: angle exponent", "criteria/_gradients.py", "(u - along**2 / x)", "(u - 0.9 * along**2 / x)", "tests/criteria/test_gradients.py::test_the_angle_is_that_of_tokens_moved_by_the_tangent"),
    Mutation("tuning: mean over depth", "tuning/_space.py", "shares[[0, -1]] = 0.5", "shares[[0, -1]] = 0.6", "tests/tuning/test_problem.py::test_the_objective_is_the_mean_over_depth"),
    Mutation("tuning: slope far below a bound", "tuning/_problem.py", "sign * slope * math.e / bound", "-sign * slope * math.e / bound", "tests/tuning/test_problem.py::test_slopes_are_differences_far_from_bounds_and_near"),
    Mutation("tuning: level of a probability", "tuning/_problem.py", "else 1 - bound", "else 1.05 * (1 - bound)", "tests/tuning/test_problem.py::test_a_bound_on_a_probability_is_one_on_a_quantile"),
    Mutation("tuning: stretched profiles", "tuning/_problem.py", "self.profile(time * self.ratio)", "self.profile(time / self.ratio)", "tests/tuning/test_problem.py::test_profiles_are_stretched_with_the_depth"),
    Mutation("gradient: statistics, variances", "likelihood/_statistics.py", "r * (count - r * S)", "r * (count - 1.05 * r * S)", "tests/likelihood/test_statistics.py::test_networks_of_one_width_pool"),
    Mutation("gradient: bound on variances", "likelihood/_terms.py", "* (y * y) * dx", "* y * dx", "tests/likelihood/test_statistics.py"),
    Mutation("gradient: projected normal", "meanfield/_projected_normal.py", "k / ratio * tangents[0]", "1.05 * k / ratio * tangents[0]", "tests/meanfield/test_projected_normal.py"),
    Mutation("mean field: first clusters", "meanfield/_modes.py", "2 / number *", "1.7 / number *", "tests/meanfield/test_clusters.py"),
    Mutation("mean field: common noise", "meanfield/_score_tests.py", "- (e**2).sum((-1, -2))]", "- 0.8 * (e**2).sum((-1, -2))]", "tests/meanfield/test_program.py::test_scores_of_many_tokens_have_mean_zero_inside_the_law"),
    Mutation("mean field: circle without normalisation", "meanfield/_reductions.py", "slope * jnp.exp(self.beta)", "1.05 * slope * jnp.exp(self.beta)", "tests/meanfield/test_modes.py::test_the_continuum_has_the_velocity_of_tokens_with_its_masses"),
    Mutation("mean field: energy", "meanfield/_flow.py", "/ (2 * self.beta)", "/ (1.9 * self.beta)", "tests/meanfield/test_flow.py::test_the_unnormalised_flow_ascends_the_gradient_of_its_energy"),
    Mutation("bridge: determinant of proposals", "likelihood/_bridge.py", "(p * jnp.log(share)", "(1.05 * p * jnp.log(share)", "tests/likelihood/test_bridge.py::test_one_token_by_quadrature"),
    Mutation("layer step: square of the mean", "likelihood/_layer_step.py", "(power - 1) / 2 * matmul", "(power - 1) / 1.8 * matmul", "tests/likelihood/test_layer_step.py::test_without_noise_it_is_the_drift_up_to_the_third_order"),
    Mutation("layer step: cubic term", "likelihood/_layer_step.py", "(both + w)", "(both + 2 * w)", "tests/likelihood/test_layer_step.py::test_one_token_has_the_variance_of_the_law_up_to_the_third_order"),
    Mutation("pooling: standard deviation", "likelihood/_assumptions.py", "sd / ratio * z", "1.05 * sd / ratio * z", "tests/models/test_hierarchical.py::test_estimates_change_no_prior"),
    Mutation("adjustment: shift", "likelihood/_path.py", "(u.T - centre - shift)", "(u.T - centre + shift)", "tests/likelihood/test_adjustment.py::test_an_adjustment_is_affine"),
    Mutation("likelihood: Jacobian of coordinates", "likelihood/_terms.py", "-(V.shape[-1] + 1) * spectrum", "-V.shape[-1] * spectrum", "tests/likelihood/test_transitions.py::test_terms_of_finite_width_are_the_dense_normal"),
    Mutation("solver: φ₂ of long steps", "solve/_splitting.py", "(away - decayed) / away**2", "(away - decayed) / (1.1 * away**2)", "tests/solve/test_splitting.py::test_a_long_step_of_a_relu_is_of_the_exponential_heun_scheme"),
    Mutation("solver: midpoints over depth", "solve/_grid.py", "(ends[1:] + ends[:-1]) / 2", "ends[:-1]", "tests/layers/test_over_depth.py::test_norms_have_the_integrated_variance"),
    Mutation("layers: depth-time of a layer", "layers/_over_depth.py", "+ 0.5) / width", "+ 1.0) / width", "tests/layers/test_over_depth.py::test_layers_have_the_parameters_of_their_middle"),
    Mutation("normals: chi variables by NumPy", "layers/_streams.py", "np.sqrt(2 * self._last", "np.sqrt(2.1 * self._last", "tests/networks/test_chain.py::test_streams_have_the_laws_of_keys"),
    Mutation("normals: rotations of Threefry", "layers/_keys.py", "(13, 15, 26, 6)", "(13, 15, 26, 7)", "tests/networks/test_chain.py::test_threefry_is_that_of_jax"),
    Mutation("normals: angle", "layers/_keys.py", "(math.pi / 4 *", "(math.pi / 4.2 *", "tests/networks/test_chain.py::test_normals_and_uniforms_have_their_laws_and_are_independent"),
    Mutation("normals: acceptance of chi", "layers/_keys.py", "(1 / 2 - u / 3)", "(1 / 2 - u / 2.7)", "tests/networks/test_chain.py::test_chi_variables_have_their_law"),
    Mutation("range: latent growth", "infer/_range.py", "np.exp(2 * np.sqrt(2 *", "np.exp(2 * np.sqrt(1.7 *", "tests/infer/test_metropolis.py::test_the_range_counts_what_the_spread_may_grow_to"),
    Mutation("range: error of the series", "infer/_range.py", "np.cumsum(bounded**8)", "np.cumsum(bounded**7)", "tests/infer/test_range.py::test_the_bound_has_the_least_error"),
    Mutation("range: mean spread", "infer/_measures.py", "(relative**6)", "(relative**5)", "tests/infer/test_range.py::test_the_mean_spread_has_the_weights_of_the_information"),
    Mutation("score of innovations", "infer/_innovations.py", "self.log_variance) / 2\n\n    @property\n    def information_of_each", "self.log_variance) / 1.9\n\n    @property\n    def information_of_each", "tests/infer/test_sandwich.py::test_scores_are_the_derivatives_of_the_log_density"),
    Mutation("identification: expected contraction", "diagnostics/_identification.py", "1 - with_priors /", "1 - 1.2 * with_priors /", "tests/diagnostics/test_identification.py::test_one_token_by_hand"),
    Mutation("innovations: Fisher information", "infer/_innovations.py", "log_variance.T @ log_variance / 2", "log_variance.T @ log_variance / 1.8", "tests/diagnostics/test_identification.py::test_one_token_by_hand"),
    Mutation("innovations: memory", "diagnostics/_innovations.py", "rows == columns, np.sqrt(2), 1.0)))", "rows == columns, 2.0, 1.0)))", "tests/diagnostics/test_innovations.py::test_the_memory_of_one_token_by_hand"),
    Mutation("shortcut: branches", "diagnostics/_assumptions.py", '"transformer": 2', '"transformer": 1', "tests/diagnostics/test_shortcut.py::test_the_distance_by_hand"),
    Mutation("shortcut: error of the posterior", "diagnostics/_assumptions.py", "float(expected.std())", "0.5 * float(expected.std())", "tests/diagnostics/test_shortcut.py::test_the_distance_by_hand"),
    Mutation("shortcut: transitions fitted", "diagnostics/_assumptions.py", "[used_of(data)]", "[used_of(data) | True]", "tests/diagnostics/test_shortcut.py::test_the_transitions_that_were_fitted_are_judged"),
    Mutation("innovations: order of tokens", "diagnostics/_innovations.py", "inverse_root @ S[follows] @ inverse_root", "S[follows]", "tests/diagnostics/test_innovations.py::test_the_memory_of_tokens_by_hand"),
    Mutation("shortcut: states before", "observation/_observer.py", "np.vecdot(X, self.before)", "np.vecdot(X, X)", "tests/observation/test_observe.py::test_the_shortcut_is_the_regression_of_a_state_on_the_one_before"),
    Mutation("innovations: memory without means", "diagnostics/_innovations.py", "score[-1] -= (", "score[-1] -= 0 * (", "tests/diagnostics/test_innovations.py::test_a_growth_of_all_layers_is_no_memory"),
    Mutation("innovations: what sums have in common", "diagnostics/_innovations.py", "sums[1] - overlap)", "sums[1])", "tests/diagnostics/test_innovations.py::test_the_memory_of_one_token_by_hand"),
    Mutation("innovations: variance of a test", "diagnostics/_innovations.py", "- 2 * (projected", "- 1.6 * (projected", "tests/diagnostics/test_innovations.py::test_the_noise_of_one_token_by_hand"),
    Mutation("distance: floor", "diagnostics/_predictive.py", "math.sqrt(2 / math.pi) *", "math.sqrt(2.2 / math.pi) *", "tests/diagnostics/test_predictive.py::test_the_floor_is_the_published_one"),
    Mutation("branches: Bartlett's factor", "diagnostics/_dependence.py", "(width - m - 0.5)", "(width - 0.5)", "tests/models/test_branches.py::test_p_values_of_independent_rows_are_uniform"),
    Mutation("alternatives: Laplace's determinant", "diagnostics/_alternatives.py", "np.log(curvature).sum() / 2", "np.log(curvature).sum()", "tests/diagnostics/test_alternatives.py::test_evidence_is_the_integral_of_the_likelihood"),
    Mutation("densities at draws: widths", "likelihood/_statistics.py", "1 / variance[..., number, None, :, :]", "1 / variance[..., 0, None, :, :]", "tests/likelihood/test_full_path.py::test_densities_at_points_by_numpy_are_those_of_each_layer"),
    Mutation("expansion: curvature", "infer/_expansion.py", "/ (4 * SECOND_STEP**2)", "/ (2 * SECOND_STEP**2)", "tests/infer/test_expansion.py"),
    Mutation("expansion: slope", "infer/_expansion.py", "/ (2 * step), 0, -1)", "/ step, 0, -1)", "tests/infer/test_expansion.py"),
    Mutation("audit: error of a standard deviation", "auditing/_law.py", "(4 * max(self.seen, 1))", "(3 * max(self.seen, 1))", "tests/auditing/test_audit.py::test_the_error_of_a_standard_deviation"),
    Mutation("audit: factor of a writer", "passes/_stream.py", "factor=writer.factor * branch.factor", "factor=writer.factor", "tests/auditing/test_audit.py::test_a_record_by_hand"),
    Mutation("observation: rounding", "observation/_doubts.py", "(1 + 2 * V**2 * scale)", "(1 + V**2 * scale)", "tests/observation/test_doubts.py::test_the_predicted_share_is_that_of_rounded_states"),
    Mutation("observation: fourth moments", "observation/_branch_observer.py", "(tokens * (tokens + 2))", "(tokens * (tokens + 1))", "tests/observation/test_branches.py::test_gaussian_increments_have_kurtosis_one"),
    Mutation("solver: derivatives forwards", "solve/_simulate.py", "if len(directions) > FORWARD_SCALARS or", "if len(directions) > 0 or", "tests/solve/test_derivatives.py::test_batches_have_the_derivatives_of_their_members"),
    Mutation("solver: derivatives contracted", "solve/_simulate.py", "jnp.tensordot(jnp.stack(directions), column, 1)", "column.sum(axis=0)", "tests/solve/test_derivatives.py::test_derivatives_are_exact_in_every_mode_and_to_the_second_order"),
    Mutation("predictions: layers", "infer/_predictive.py", ")[:, steps // every]", ")[:, : len(steps)]", "tests/infer/test_predictive.py::test_replicates_are_networks_of_the_parameters_of_their_draw"),
    Mutation("predictions: parameters of networks", "networks/_sample.py", "operator.itemgetter(members)", "operator.itemgetter(slice(0, stop - start))", "tests/infer/test_predictive.py::test_replicates_are_networks_of_the_parameters_of_their_draw"),
    Mutation("networks: tangents of features", "layers/_wishart.py", "(X[tokens:],)))", "(X[:tokens],)))", "tests/networks/test_tangent_chain.py::test_the_chain_of_tangents_has_the_law_of_the_weights"),
    Mutation("tuning: tangents of chains", "tuning/_samples.py", "D = S[..., tokens:, tokens:] if tangents", "D = S[..., :tokens, :tokens] if tangents", "tests/tuning/test_problem.py::test_gradients_are_those_of_networks_of_width_n_from_four_columns_a_token_on"),
    Mutation("check: best draw of predictions", "diagnostics/_predictive.py", "axis=0).max()) if p_values", "axis=0).min()) if p_values", "tests/diagnostics/test_predictive.py::test_networks_that_no_draw_predicts_fail"),
    Mutation("networks: root of outputs", "networks/_sample.py", "np.maximum(values, 0.0))[:, None]", "np.maximum(values, 0.0))[..., None]", "tests/networks/test_sample.py::test_outputs_have_the_covariance_of_the_last_layer"),
    Mutation("covariance: forms of a pattern", "covariance/_pattern_noise.py", "@ inverse / 2", "@ inverse / 1.9", "tests/covariance/test_pattern.py::test_forms_read_and_make_the_coordinates"),
    Mutation("modules: temperature", "modules/_shared.py", "math.sqrt(width * key_width)", "width", "tests/modules/test_modules.py::test_modules_compute_the_equations_of_the_paper"),
    Mutation("modules: gain of the centring", "modules/flax.py", "self.gamma2 / count", "0.9 * self.gamma2 / count", "tests/modules/test_modules.py::test_modules_compute_the_equations_of_the_paper"),
    Mutation("bridge: normalisation of the last layer", "likelihood/_bridge.py", "jnp.log(2 * jnp.pi * step.variance)", "jnp.log(2.1 * jnp.pi * step.variance)", "tests/likelihood/test_bridge.py::test_one_layer_by_the_change_of_variables"),
    Mutation("bridge: Jacobian of the last layer", "likelihood/_bridge.py", "jacobian + 2 * jnp", "jacobian + 1.9 * jnp", "tests/likelihood/test_bridge.py::test_one_layer_by_the_change_of_variables"),
    Mutation("bridge: volume of the last layer", "likelihood/_bridge.py", "- (len(V) + 1) * step", "- len(V) * step", "tests/likelihood/test_bridge.py::test_one_layer_by_the_change_of_variables"),
    Mutation("bridge: noise of proposals", "likelihood/_bridge.py", "jnp.sqrt(share * step.variance /", "jnp.sqrt(1.05 * share * step.variance /", "tests/likelihood/test_bridge.py::test_one_token_by_quadrature"),
    Mutation("bridge: pull of the end", "likelihood/_bridge.py", "pull = 1 / (to_go", "pull = 1 / (1.05 * to_go", "tests/likelihood/test_bridge.py::test_bridges_are_exact_where_steps_commute_and_are_small"),
    Mutation("blocks: volume of the mean", "blocks/_law.py", "- (m + 1) / 2 * log_det", "- m / 2 * log_det", "tests/blocks/test_law.py::test_density_of_a_wishart_matrix"),
    Mutation("blocks: scale-free χ²", "blocks/_information.py", "linear**2 / (2 * quadratic)", "linear**2 / (2.1 * quadratic)", "tests/blocks/test_information.py::test_the_scale_free_density_is_that_of_a_t_law"),
    Mutation("blocks: units of an MLP", "blocks/_mlp.py", "/ count) / self.units", "/ count) / 1.05 / self.units", "tests/blocks/test_law.py::test_identity_has_the_moments_of_normals"),
    Mutation("blocks: features after a LayerNorm", "blocks/_block.py", "features=width - 1 if", "features=width if", "tests/blocks/test_block.py::test_a_layer_norm_takes_one_feature"),
    Mutation("blocks: ends of the interpolation", "blocks/_coefficients.py", "weights[[0, -1]] /= 2", "weights[[0, -1]] /= 1.9", "tests/blocks/test_law.py::test_interpolation_of_polynomials_is_exact"),
    Mutation("criteria: exponent of the bandwidth", "criteria/_criteria.py", "known.size ** (-1 / 5)", "known.size ** (-1 / 4)", "tests/criteria/test_criteria.py::test_smooth_probabilities_take_the_quartiles_for_the_scale_of_heavy_tails"),
    Mutation("criteria: error of a quantile", "criteria/_criteria.py", "/ float(density)", "/ (1.05 * float(density))", "tests/criteria/test_criteria.py::test_errors_are_those_of_large_samples"),
    Mutation("criteria: start of a token and its copy", "criteria/_gradients.py", "= 0.5, -0.5", "= 0.5, -0.45", "tests/criteria/test_gradients.py::test_the_angle_is_that_of_tokens_moved_by_the_tangent"),
    Mutation("tuning: offsets of estimates", "tuning/_problem.py", "estimate.value + offset", "estimate.value + 0.9 * offset", "tests/tuning/test_problem.py::test_offsets_move_values_and_estimates"),
    Mutation("tuning: depth-time of the coefficients", "tuning/_space.py", "c[:, None] * time", "1.05 * c[:, None] * time", "tests/tuning/test_problem.py::test_coefficients_are_those_of_the_layer_over_unit_time"),
    Mutation("tuning: slope near a bound", "tuning/_problem.py", "sign * slope / value", "sign * slope / bound", "tests/tuning/test_problem.py::test_slopes_are_differences_far_from_bounds_and_near"),
    Mutation("gradient: statistics, coefficients", "likelihood/_statistics.py", "((rows @ r.reshape(-1))[1:]", "((1.05 * rows @ r.reshape(-1))[1:]", "tests/likelihood/test_statistics.py"),
    Mutation("gradient: alignment of a ReLU", "terms/_relu.py", "-jnp.arccos(jnp.clip(rho, -1.0, 1.0))", "-1.05 * jnp.arccos(jnp.clip(rho, -1.0, 1.0))", "tests/layers/test_relu.py"),
    Mutation("gradient: eigenvectors", "covariance/_eigen.py", "matmul(U, turn))", "matmul(U, 1.05 * turn))", "tests/covariance/test_eigen.py"),
    Mutation("mean field: common noise along tokens", "meanfield/_score_tests.py", "((e**2).sum(-1) * (points**2).sum(-1))", "(0.8 * (e**2).sum(-1) * (points**2).sum(-1))", "tests/meanfield/test_program.py::test_scores_of_many_tokens_have_mean_zero_inside_the_law"),
    Mutation("mean field: step of a layer", "meanfield/_flow.py", "tokens + step * self", "tokens + 1.05 * step * self", "tests/meanfield/test_flow.py::test_layers_are_steps_of_eulers_method"),
    Mutation("mean field: size of a misfit", "meanfield/_score_tests.py", "/ (len(scores) * components)", "/ (1.1 * len(scores) * components)", "tests/meanfield/test_program.py::test_the_size_of_a_misfit_by_hand"),
    Mutation("consequences: size of a misfit", "diagnostics/_consequences.py", "size = sums.corrected", "size = 1.1 * sums.corrected", "tests/diagnostics/test_consequences.py::test_the_move_by_the_noise_of_one_token_by_hand"),
    Mutation("consequences: move by a prior", "diagnostics/_consequences.py", "move = variance * sums", "move = 1.1 * variance * sums", "tests/diagnostics/test_consequences.py::test_the_move_by_a_prior_of_one_token_by_hand"),
    Mutation("range: variance of the logits", "infer/_measures.py", "np.maximum(size - 1, 1)", "np.maximum(size, 1)", "tests/infer/test_range.py::test_the_spread_is_that_of_logits_in_a_row"),
    Mutation("range: drift of the coldest layer", "infer/_range.py", "square * limit.attention_drift", "np.sqrt(square) * limit.attention_drift", "tests/infer/test_range.py::test_the_drift_of_the_coldest_layer_is_without_its_temperature"),
    Mutation("range: information of more networks", "infer/_range.py", "/ information / data_per_sample)", "/ information / data_per_sample**2)", "tests/infer/test_range.py::test_four_times_as_many_networks_halve_the_error_of_the_data"),
    Mutation("audit: √(2L)", "auditing/_recipes.py", "sd / math.sqrt(2 * matrix.layers)", "sd / math.sqrt(2.1 * matrix.layers)", "tests/auditing/test_audit.py::test_standard_deviations_are_those_by_hand"),
    Mutation("audit: fan-in of a uniform law", "auditing/_recipes.py", "math.sqrt(3 * max(matrix.fan_in, 1))", "math.sqrt(3 * max(matrix.fan_out, 1))", "tests/auditing/test_audit.py::test_standard_deviations_are_those_by_hand"),
    Mutation("audit: level of one test", "auditing/_tests.py", "LEVEL / (2 * max", "LEVEL / (2.1 * max", "tests/auditing/test_audit.py::test_the_level_is_that_of_all_tests_together"),
    Mutation("audit: weights of pooled tensors", "auditing/_tests.py", "weights = np.array([row.error**-2.0", "weights = np.array([row.error**-1.0", "tests/auditing/test_audit.py::test_a_pooled_ratio_is_that_of_all_entries"),
    Mutation("audit: σ at the base width", "auditing/_recipes.py", "math.sqrt(base_width / matrix.width)", "math.sqrt(matrix.width / base_width)", "tests/auditing/test_audit.py::test_standard_deviations_are_those_by_hand"),
    Mutation("audit: fan-in of a strength", "auditing/_scaling.py", "row.law.sd * factor * math.sqrt(row.matrix.fan_in)", "row.law.sd * factor * math.sqrt(row.matrix.fan_out)", "tests/auditing/test_audit.py::test_exponents_over_width_and_depth"),
    # Of every room again, chosen in the same way.
    Mutation("covariance: least common correlation", "covariance/_matrix.py", "-1.0 / (tokens - 1)", "-1.0 / tokens", "tests/covariance/test_matrix.py"),
    Mutation("solver: linear noise, second order", "terms/_linear.py", "2 / k + 3 / k**2)", "2 / k + 2 / k**2)", "tests/solve/test_splitting.py"),
    Mutation("solver: midpoint of attention's drift", "terms/_attention.py", "velocity(X + h / 2 * velocity(X))", "velocity(X + h / 3 * velocity(X))", "tests/solve/test_splitting.py"),
    Mutation("next order: F₂ with a pattern, squares", "layers/_pattern_order.py", "- 16 * drift**2", "- 15 * drift**2", "tests/layers/test_pattern_order.py"),
    Mutation("next order: ReLU's growth on the diagonal", "layers/_finite_width.py", "relu**2) / (1 + equal)", "relu**2) / (1 + 2 * equal)", "tests/layers/test_finite_width.py"),
    Mutation("networks: squared norms of gradients", "networks/_gradients.py", "axis=2), axis=0) / width", "axis=2), axis=0) / (1.05 * width)", "tests/networks/test_gradients.py"),
    Mutation("observation: variance of rounding", "observation/_doubts.py", "4 * variance / width", "3 * variance / width", "tests/observation/test_doubts.py"),
    Mutation("networks: least width of a chain", "networks/_chain.py", "width < 2 * tokens * blocks", "width < tokens * blocks", "tests/networks/test_refusals.py"),
    Mutation("bridge: series of the logarithm", "likelihood/_bridge.py", "equal / (2 * terms - 1)", "equal / (2 * terms + 1)", "tests/likelihood/test_bridge.py"),
    Mutation("layer step: power by the skewness", "likelihood/_layer_step.py", "abs(3 - 3 / power - skewness)", "abs(3 - 2 / power - skewness)", "tests/likelihood/test_layer_step.py"),
    Mutation("increments: factor of the strengths", "likelihood/_increments.py", "log_factor = 2 * jnp.log", "log_factor = 1.9 * jnp.log", "tests/blocks/test_information.py::test_the_scale_free_density_does_not_depend_on_the_scale"),
    Mutation("alternatives: error of a penalty", "diagnostics/_alternatives.py", "np.maximum(mean + 3 * sd, 0.0)", "np.maximum(mean - 3 * sd, 0.0)", "tests/diagnostics/test_alternatives.py"),
    Mutation("branches: χ² of a gain", "diagnostics/_branch_tests.py", "stats.chi2.sf(2 * gains.max(), 1)", "stats.chi2.sf(1.2 * gains.max(), 1)", "tests/diagnostics/test_branch_tests.py"),
    Mutation("check: least spread of one layer", "diagnostics/_assumptions.py", "4 / (tokens * (tokens + 1))", "2 / (tokens * (tokens + 1))", "tests/diagnostics/test_one_layer.py::test_squares_that_are_alike_are_no_evidence"),
    Mutation("stack: skewness", "layers/_stack.py", "3 * count * (count - 1)", "2.7 * count * (count - 1)", "tests/networks/test_sample.py::test_the_skewness_of_a_stack_is_that_of_a_product"),
    Mutation("tuning: curvature of constraints", "tuning/_answer.py", "worst.slope + weights @", "worst.slope + 1.2 * weights @", "tests/tuning/test_tune.py::test_the_conditions_of_one_constraint_by_hand"),
    Mutation("tuning: middle of a layer", "tuning/_problem.py", "jnp.asarray((ends[1:] + ends[:-1]) / 2, float)", "jnp.asarray(ends[1:], float)", "tests/tuning/test_problem.py"),
    Mutation("expansion: curvature by slopes", "infer/_expansion.py", "/ (4 * step)", "/ (3.6 * step)", "tests/infer/test_sandwich.py::test_the_curvature_at_a_mode_is_the_second_derivative_of_the_potential"),
    Mutation("metropolis: exponent of the t law", "infer/_metropolis.py", "-(PROPOSAL_FREEDOM + len(x)) / 2", "-(PROPOSAL_FREEDOM + len(x) + 1) / 2", "tests/infer/test_metropolis.py::test_independence_moves_have_the_density_of_a_t_law"),
    Mutation("audit: inputs of a part", "passes/_account.py", "by_row[index // count]", "by_row[index % count]", "tests/auditing/test_parts.py"),
    Mutation("audit: columns of a part", "passes/_account.py", "self.by_output[self.columns]", "self.by_output", "tests/auditing/test_parts.py"),
    Mutation("audit: a norm adds ε", "passes/_readings.py", "self.least * (1 - LOG_SD_TOLERANCE)", "0.5 * (1 - LOG_SD_TOLERANCE)", "tests/auditing/test_kinds.py"),
    Mutation("audit: what a matrix reads", "passes/_readings.py", "factor, least = math.sqrt(np.median(rows))", "factor, least = float(np.median(rows)) ** 0.1", "tests/auditing/test_kinds.py"),
    Mutation("audit: probabilities over keys", "passes/_attention.py", "if largest <= 1 + 1e-3:", "if largest <= 100:", "tests/auditing/test_kinds.py"),
    Mutation("audit: what is not tested", "auditing/_result.py", "return True if self.declared and not self.untested else None", "return True if self.declared else None", "tests/auditing/test_kinds.py"),
    Mutation("audit: parameters of a layer without use", "auditing/_facts.py", "if layer and not expert and (layer", "if not layer and not expert and (layer", "tests/auditing/test_kinds.py"),
    Mutation("audit: the interval of a σ", "auditing/_tests.py", "tail < stats.norm.sf(z)", "tail < stats.norm.sf(0.1 * z)", "tests/auditing/test_kinds.py tests/auditing/test_audit.py"),
    Mutation("audit: error of another model's σ", "auditing/_tests.py", "math.hypot(self.law.error, 0.0 if", "math.hypot(self.law.error, 0.0 if True or", "tests/auditing/test_parts.py"),
    Mutation("audit: what no output follows from", "passes/_record.py", 'if id(node) in used or node.kind == "parameter"', "if node", "tests/auditing/test_kinds.py"),
    Mutation("blocks: chain, heads of one norm", "blocks/_logits.py", '(len(self.queries) if over == "all" else 1)', '(len(self.queries) - 1 if over == "all" else 1)', TODAY),
    Mutation("blocks: chain, queries outside of the span of keys", "blocks/_logits.py", "total(jnp.square(matmul(of_queries, factor)), axis=1)", "0.0 * total(jnp.square(matmul(of_queries, factor)), axis=1)", TODAY),
    Mutation("blocks: column of a sink", "blocks/_logits.py", "axis=-1)[..., :-1]", "axis=-1)[..., 1:]", TODAY),
    Mutation("blocks: cap of logits", "blocks/_logits.py", "self.cap * jnp.tanh(logits / self.cap)", "self.cap * (logits / self.cap)", TODAY),
    Mutation("blocks: features that are not rotated", "blocks/_attention.py", "else size - self.rope_size", "else size", TODAY),
    Mutation("blocks: chain, sigmoids of gates", "blocks/_attention.py", "* jax.nn.sigmoid(matmul(of_gates, gate))", "* matmul(of_gates, gate)", TODAY),
    Mutation("blocks: moments, sigmoids of gates", "blocks/_attention_parts.py", "return jax.nn.sigmoid(jnp.einsum(", "return (jnp.einsum(", TODAY),
    Mutation("blocks: chain, rotated keys that heads share", "blocks/_latent.py", "key_groups=1,", "key_groups=heads,", TODAY),
    Mutation("blocks: size of plain and rotated features", "blocks/_latent.py", "self.head_size + self.rotated_size, self.pattern", "self.head_size, self.pattern", TODAY),
    Mutation("blocks: moments of values of compressed tokens", "blocks/_latent.py", "(self.heads**2 * self._value_size)", "(self.heads * self._value_size)", TODAY),
    Mutation("blocks: softmax of the chosen experts", "blocks/_experts.py", "jnp.where(largest, logits, -jnp.inf)", "logits", TODAY),
    Mutation("blocks: units of shared experts", "blocks/_experts.py", "means + ratio * of_shared.mean", "means + of_shared.mean", TODAY),
    Mutation("blocks: moments of an offset", "blocks/_mlp.py", "fourth_moments(P + N) - fourth_moments(N)", "fourth_moments(P + N)", TODAY),
    Mutation("blocks: evidence for another block", "blocks/_alternatives.py", "_log_density(increments, alternative) - log_density", "_log_density(increments, alternative)", "tests/blocks/test_alternatives.py::test_evidence_is_the_integral_over_strengths"),
    Mutation("blocks: norm after a branch", "blocks/_block.py", "jnp.square(parts.inside) + jnp.square(parts.outside)", "jnp.square(parts.inside)", "tests/blocks/test_block.py::test_a_norm_after_the_branch_leaves_the_angle_of_an_increment"),
    Mutation("blocks: branches beside each other", "blocks/_parallel.py", "functools.reduce(operator.add, S)", "S[0]", "tests/blocks/test_block.py::test_blocks_beside_each_other_read_one_norm_and_add"),
    Mutation("blocks of a model: strength", "blocks/reading/_sizes.py", "math.sqrt(sizes.last_square * of_linear / float(branch.gain))", "math.sqrt(sizes.last_square)", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: gain of a norm", "blocks/reading/_sizes.py", "_gain_of_norm(branch) ** 2", "_gain_of_norm(branch)", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: temperature", "blocks/reading/_sizes.py", "SelfAttention(1 / sizes.factor(\"logits\")", "SelfAttention(sizes.factor(\"logits\")", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: base of rotations", "blocks/reading/_values.py", "angles[1] ** -pairs", "angles[1] ** (1 - pairs)", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: logits", "blocks/reading/_values.py", "np.abs(log - factor * Y).max() <=", "np.abs(log - factor * Y).min() <=", "tests/blocks/test_of.py"),
    Mutation("a pass: first state of a stream", "passes/_taps.py", "return [start, *last.values()]", "return [branches[0].link.sum, *last.values()]", "tests/observation/test_networks.py"),
    Mutation("blocks of a model: cap", "blocks/reading/_attention.py", "capped[0] if capped else None", "None", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: branches beside each other", "blocks/reading/_of.py", "if not any(beside):", "if True:", "tests/blocks/test_of.py"),
    Mutation("blocks of a model: norm of an increment", "blocks/reading/_sizes.py", "    if output_norms:", "    if not output_norms:", "tests/blocks/test_of.py"),
    Mutation("a pass: what a branch reads", "passes/_taps.py", "node, size = self.readings[0].product.inputs[0],", "node, size = self.link.skip.origin,", "tests/observation/test_networks.py"),
    Mutation("audit: tokens that are changed", "auditing/_books.py", "for token in dict.fromkeys((tokens // 2, 1, tokens - 1)):", "for token in (tokens // 2,):", "tests/auditing/test_kinds.py"),
    Mutation("audit: entries in another order", "auditing/_law.py", "np.allclose(earlier[1:3], later[1:3], rtol=2e-6, atol=0.0)", "earlier is later", "tests/auditing/test_audit.py"),
    Mutation("audit: margin of a uniform law", "auditing/_law.py", "max(10.7 / math.sqrt(n), 0.08)", "0.08", "tests/auditing/test_audit.py"),
    Mutation("audit: parts of a stack", "passes/_models.py", "arrays[name][index] = values", "arrays[name][:0] = values", "tests/auditing/test_kinds.py"),
    Mutation("audit: what is added twice", "passes/_stream.py", "link.again = \"what", "link.kind = \"what", "tests/auditing/test_kinds.py"),
    Mutation("audit: the logits' factor in all layers", "auditing/_causes.py", "(root, wide, ", "(wide, root, ", "tests/auditing/test_kinds.py"),
    Mutation("audit: errors of exponents", "auditing/_scaling.py", "weight[:, None] ** 2).T @ design", "weight[:, None]).T @ design", "tests/auditing/test_audit.py"),
)  # fmt: skip


def copied(folder: Path) -> Path:
    """The tracked files and the new ones of the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    # The environment finds sdeinfer.models in the working tree; the copy has to come first.
    (folder / "sdeinfer" / "models").symlink_to("../models")
    return folder


def mutate(tree: Path, mutation: Mutation) -> None:
    """Change the copy."""
    path = tree / "sdeinfer" / mutation.file
    text = path.read_text("utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.old!r} is {text.count(mutation.old)} times in {mutation.file}")
    path.write_text(text.replace(mutation.old, mutation.new), "utf-8")


class Failures:
    """A plugin of pytest that notes the tests which fail."""

    def __init__(self):
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report):
        """A phase of a test has ended."""
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)

    def pytest_collectreport(self, report):
        """A file was collected."""
        if report.failed:
            self.tests.append(report.nodeid)


def failing(tree: Path, tests: list[str], *options: str) -> list[str]:
    """The tests that fail in this process, which has not imported the package yet."""
    import pytest

    failures = Failures()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    settings = "-q -n 0 -p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning".split()
    code = pytest.main([*settings, *options, *tests], plugins=[failures])
    if code not in (0, 1, 2) or (code and not failures.tests):
        raise RuntimeError(f"pytest ended with {code!r} for {' '.join(tests)}")
    return failures.tests


def forked(function, *arguments):
    """The result of a function in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def tried(mutation: Mutation, *, rooms: bool, options: tuple[str, ...]) -> tuple[Mutation, float, list[str]]:
    """The tests that a mutation fails: of those beside it, or else of all."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sdeinfer-mutation-") as folder:
        tree = copied(Path(folder))
        mutate(tree, mutation)
        failed = forked(failing, tree, mutation.tests.split(), *options)
        if not failed and not rooms:
            failed = forked(failing, tree, ["tests"], *options)
    return mutation, time.monotonic() - start, failed


def chosen_by(words: list[str]) -> list[Mutation]:
    """The mutations whose name contains one of these words; all if there are none."""
    return [m for m in MUTATIONS if not words or any(word in m.name for word in words)]


def attempts(mutations: list[Mutation], *, processes: int, rooms: bool = True, options: tuple[str, ...] = ()):
    """Try mutations, some at a time, which share a folder of compiled programs; results come as they are ready."""
    with tempfile.TemporaryDirectory(prefix="sdeinfer-compiled-") as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
        for library in LIBRARIES.split():
            importlib.import_module(library)
        with ThreadPool(processes) as pool:
            yield from pool.imap_unordered(lambda m: tried(m, rooms=rooms, options=options), mutations)


def main() -> int:
    """Print a line for each mutation."""
    parser = argparse.ArgumentParser(description="Run the default tests with wrong coefficients.")
    parser.add_argument("words", nargs="*", help="mutations whose name contains one of these words; all if none")
    parser.add_argument("--rooms", action="store_true", help="only the tests beside each mutation")
    parser.add_argument(
        "-n", dest="processes", type=int, default=len(os.sched_getaffinity(0)), help="mutations at a time"
    )
    options = parser.parse_args()
    mutations, survived = chosen_by(options.words), 0
    found = attempts(mutations, processes=options.processes, rooms=options.rooms, options=(f"--maxfail={SHOWN}",))
    for mutation, seconds, failed in found:
        survived += not failed
        names = "; ".join(name.removeprefix("tests/") for name in failed) or "NONE"
        print(f"{mutation.name:45s} {seconds:5.0f} s  {names}", flush=True)
    print(f"{len(mutations) - survived} of {len(mutations)} mutations fail the tests")
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main())
