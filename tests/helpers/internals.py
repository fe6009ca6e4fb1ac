"""What tests import from inside of the package, by room: when rooms are regrouped, this file alone changes."""

from sdeinfer import _cache, _progress
from sdeinfer._files import InputError, staged_file, staged_folder
from sdeinfer._map_chunks import map_chunks
from sdeinfer._progress import ProgressBar, done, phase, progress_line, with_progress_line
from sdeinfer._seeds import of_seed
from sdeinfer._threads import in_threads
from sdeinfer.auditing._law import Law, copies, law_of, repeated_slices
from sdeinfer.auditing._recipe import Declared
from sdeinfer.auditing._tests import Row, critical, pooled_ratio
from sdeinfer.blocks._alternatives import evidence_of_others
from sdeinfer.blocks._attributes import stack_in, text_of, unlike_blocks
from sdeinfer.blocks._coefficients import (
    LARGEST_FACTOR,
    LOG_FACTORS,
    BranchInput,
    branch_coefficients,
    branch_inputs,
    interpolated,
)
from sdeinfer.blocks._information import STEP, _at_steps, _by_t, _drawn_coefficients, adjusted_coefficients, scale_free
from sdeinfer.blocks._logits import plain_products
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.blocks.reading._of import network_of
from sdeinfer.blocks.reading._values import (
    activations_of_values,
    base_of_rotations,
    factor_of_logits,
    norms_of_values,
    sink_of,
)
from sdeinfer.cli import _fits
from sdeinfer.cli._app import EXAMPLES
from sdeinfer.cli._fits import print_tests
from sdeinfer.covariance._batched import (
    UNROLLED,
    cholesky,
    gram,
    is_positive_definite,
    matmul,
    product,
    semidefinite_cholesky,
    total,
    transpose,
)
from sdeinfer.covariance._diffusion import Spectrum, spectrum
from sdeinfer.covariance._eigen import SWEEPS, eigh
from sdeinfer.covariance._matrix import (
    centre,
    covariance_fault,
    factor,
    pairs,
    safe_sqrt,
    singular,
    unvech,
    validate_covariance,
    vech,
)
from sdeinfer.covariance._pattern import EVERY_TOKEN, centring
from sdeinfer.covariance._pattern_noise import PatternSpectrum, attended_mean, differences, overlap, pattern_spectrum
from sdeinfer.diagnostics._alternatives import (
    Alternative,
    check_candidates,
    different_sizes,
    log_ratios,
    neighbours,
)
from sdeinfer.diagnostics._assumptions import check_shortcuts, check_skewness, check_unlike_layers, third_moments
from sdeinfer.diagnostics._branch_tests import BranchTests
from sdeinfer.diagnostics._consequences import check_conflict
from sdeinfer.diagnostics._dependence import dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from sdeinfer.diagnostics._innovations import DIRECTIONS, ScoreSums, direction_weights, successive
from sdeinfer.diagnostics._predictive import of_draws, of_predictions
from sdeinfer.diagnostics._range import check_range, excluded_layers
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import identified_of
from sdeinfer.diagnostics._thresholds import BRANCH_LEVEL, EVIDENCE, EXACT_DISTANCE, FEWEST_TRANSITIONS, LEVEL, PRIOR_SD
from sdeinfer.diagnostics._verdict import IN_RANGE, QUESTIONS, at_least, at_most
from sdeinfer.infer import _assume
from sdeinfer.infer._assume import architecture_of, placed, problem_of, require_complete
from sdeinfer.infer._covariances import groups_of_data
from sdeinfer.infer._densities import log_likelihoods, unobserved_structure
from sdeinfer.infer._expansion import SECOND_STEP, curvature, expansion, minimum, points_around, slopes
from sdeinfer.infer._innovations import LawAt
from sdeinfer.infer._latent_densities import draw_latent, latent_mode, log_prior, log_weights
from sdeinfer.infer._measures import (
    attention_bend,
    attention_growth,
    logit_scale,
    logit_spread,
    mean_spread,
    measures_of,
    rounding,
)
from sdeinfer.infer._metropolis import PROPOSAL_FREEDOM, Proposal, _log_t
from sdeinfer.infer._mode import (
    LayerAt,
    Mode,
    curvature_of_priors,
    found_from,
    layer_at,
    posterior_mode,
    potential,
    potential_and_slope,
)
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._posterior import Posterior as SampledPosterior
from sdeinfer.infer._predictive import affordable_draws, last_layer, predicted_draws
from sdeinfer.infer._range import (
    ColdestLayer,
    Range,
    Selection,
    in_range,
    latent_time,
    range_to_fit,
    spread_growth,
    transitions_allowed,
)
from sdeinfer.infer._samplers import recorded_draws
from sdeinfer.infer._sandwich import _dispersion, _matrix, _scatter, sandwich
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers._absolute_moments import LARGEST_ERROR
from sdeinfer.layers._base import check_parameters
from sdeinfer.layers._finite_width import ATTENTION_NEXT, VARIANCE_FEATURES, drift_terms, variance_terms
from sdeinfer.layers._keys import NetworkKeys, threefry
from sdeinfer.layers._next_order import (
    Frame,
    absolute_squares,
    angles,
    attention_drift_next,
    attention_noise_next,
    frame,
    relu_drift_along,
    relu_noise,
)
from sdeinfer.layers._over_depth import as_module
from sdeinfer.layers._pattern_order import (
    attention_noise_tensor,
    pattern_drift_next,
    pattern_features,
    relu_drift_curvature,
)
from sdeinfer.layers._streams import GROUP, NetworkStreams
from sdeinfer.layers._templates import ARCHITECTURES, attributes_of_layer, call_of, is_named, sizes_in_words
from sdeinfer.layers._wishart import wishart_draws, wishart_factor
from sdeinfer.likelihood import _terms, _transitions
from sdeinfer.likelihood._assumptions import Assumptions, checked_priors
from sdeinfer.likelihood._bridge import Span, _log, bridge, bridges_of
from sdeinfer.likelihood._full_path import FullPath, densities_at
from sdeinfer.likelihood._increments import BranchPath, Increments
from sdeinfer.likelihood._layer_step import LayerLaw, layer_step, power_of
from sdeinfer.likelihood._model import as_model
from sdeinfer.likelihood._path import (
    AbstractPath,
    Adjustment,
    Transitions,
    in_default_types,
    no_adjustment,
    transitions_of,
)
from sdeinfer.likelihood._reduction import path_layout, path_statistics
from sdeinfer.likelihood._statistics import PathStatistics, blank_statistics
from sdeinfer.likelihood._terms import Terms, of_limits
from sdeinfer.likelihood._transitions import USED, Path, observed_path, used_of, with_used
from sdeinfer.meanfield._score_tests import _tested
from sdeinfer.networks._chain import _initial_blocks
from sdeinfer.networks._gradients import sample_gradients, sample_tangents
from sdeinfer.networks._sample import sample_chains
from sdeinfer.observation import _stored
from sdeinfer.observation._branches import BRANCH_DIMS
from sdeinfer.observation._dataset import groups_of, outputs_of, truth_of
from sdeinfer.observation._doubts import rounding_share
from sdeinfer.observation._store import open_in_chunks, write_parts
from sdeinfer.observation._stored import observe_file
from sdeinfer.passes._account import Places, places_of
from sdeinfer.passes._attention import attended
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._record import Node, Record, StoredTensor
from sdeinfer.passes._stream import streams_of
from sdeinfer.report._fit import summary
from sdeinfer.solve._grid import step_grid
from sdeinfer.solve._simulate import FORWARD_SCALARS, along_few_numbers
from sdeinfer.solve._solve import fill_after, scan_paths
from sdeinfer.solve._splitting import flows_of, splitting_step
from sdeinfer.solve._stopped import PAPERS_RANGE
from sdeinfer.terms._attention import (
    Attention,
    AttentionStrength,
    attention_drift,
    attention_drift_vectors,
)
from sdeinfer.terms._attention_noise import attention_noise, attention_noise_flow
from sdeinfer.terms._limit import Limit
from sdeinfer.terms._linear import LinearNoise
from sdeinfer.terms._relu import ShapedReLU, relu_alignment, relu_drift
from sdeinfer.tuning._answer import _conditions
from sdeinfer.tuning._problem import Value, _in_residuals
from sdeinfer.tuning._samples import chain_sample
from sdeinfer.tuning._search import _moved
from sdeinfer.tuning._space import coefficients
from sdeinfer.tuning._tune import with_shapes
