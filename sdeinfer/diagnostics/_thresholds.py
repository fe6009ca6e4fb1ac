"""Thresholds of the verdicts, with what they mean. Tests: `tests/diagnostics/test_check.py`."""

import math

LEVEL, RARE_LEVEL = 0.01, 1e-3
"""False-alarm probability of each test of calibration; and that of tests which would otherwise fail as many right fits
as all others together."""

LARGEST_DEVIATION = 4.0
"""Largest acceptable distance of a parameter from its truth, its declared value or its value by hidden states, in
standard deviations of what is compared."""

SD_RATIO = 1.5
"""Largest acceptable ratio of two standard deviations: of the noise of one layer and that of all, which a missing state
makes about 2, and by the scatter of networks and that of the posterior."""

FEWEST_TRANSITIONS = 16
"""Number of transitions below which a layer is not tested, nor γ by hidden states."""

COLD_PROBABILITY = 0.01
"""Largest acceptable posterior probability that the softmax is out of range, where the data do not identify τ0."""

SHARED_CORRELATION = 0.01
"""Largest acceptable correlation between networks: 64 networks with a correlation of 0.01 have posterior standard
deviations that are 1.3 times too small."""

LARGEST_MOVE = 1.0
"""Largest acceptable move of a parameter by a misfit, in posterior standard deviations."""

PRIOR_CONFLICT = 5.0
"""Distance of a prior from the data without it, in standard deviations of both, above which it contradicts them."""

MISFIT_EFFECT = 0.2
"""Root mean square of a misfit, in standard deviations of a layer's increments, above which layers are of something
else, whether or not it moves a parameter. Shaped layers at the edge of the law's range are below 0.1."""

SKEWNESS = 0.2
"""Largest acceptable relative distance of the skewness of layers from that of exact ones: orthogonal weights have .57
of the skewness of a diagonal increment in a Transformer at small γ, and none in attention."""

EVIDENCE = math.log(100)
"""Log evidence by which another architecture must exceed the fitted one, or fall short of it to be excluded."""

SPREAD = {"finite-width": 1.5, "limit": 0.75}
"""Largest acceptable mean spread of the logits in a row of the softmax, weighted by the information on τ0 (∝ s⁴)."""

LEAST_USED, FEWEST_USED = 0.05, 0.01
"""Fraction of transitions inside the range of the law below which the others are compared with exact layers; and the
smallest acceptable one where they cannot be."""

FRACTION_IN_RANGE = 0.5
"""Fraction of transitions in range below which a note and the overall verdict state it: a fit to few is no
evidence on the others."""

EXACT_DISTANCE = 6.0
"""Largest acceptable distance of layers outside the range from exact ones, in standard deviations of 96 draws."""

RHAT, ROUGH_RHAT = 1.05, 1.01
"""Upper bound on R-hat: the means of chains then differ by about 0.3 posterior sds. Above the second bound, means are
rough, and there is a note."""

ESS, ROUGH_ESS = 100, 400
"""Smallest acceptable effective sample size, for Monte Carlo errors of 0.1 posterior sds; below the second bound, means
are rough."""

DIVERGENT_FRACTION = 0.01
"""Largest acceptable fraction of divergent draws; they can move a mean by some hundredths of a posterior sd."""

BFMI = 0.3
"""Smallest acceptable BFMI (Bayesian fraction of missing information)."""

CONTRACTION = 0.5
"""Smallest acceptable contraction from prior to posterior variance."""

FLOORS = 3.0
"""Largest acceptable distance from predictions, in units of its floor; samples of one law are at 1 ± 0.5."""

NO_DRAW_LEVEL, FEWEST_NETWORKS = 1e-4, 8
"""The p-value of the best draw below which no draw predicts the networks, and the least number of these."""

# Thresholds for increments of branches; each counts where its test is significant.

STRENGTH_RATIO = 1.1
"""Largest acceptable ratio of a strength of one layer to that of all, or its inverse."""

CHI_SQUARE_DISTANCE = 0.25
"""Largest acceptable distance of χ² over its degrees of freedom from 1."""

EXPLAINED_SHARE = 0.01
"""Largest acceptable share of an increment's variance that another branch, or the input, explains beyond chance."""

EXCESS_KURTOSIS = 0.2
"""Largest acceptable relative excess of the fourth moment of increments over that of normals."""

NORM_ERROR = 0.1
"""Largest acceptable distance of a mean square after a norm from 1; the constant in the root takes some percent."""

SHAPE_RATIO = 1.15
"""Largest acceptable ratio of a gain or temperature that the data prefer to the assumed one."""

BRANCH_LEVEL = LEVEL / 7
"""False-alarm probability of each of the seven tests of increments."""

NAMED_LAYERS = 3
"""Number of layers with other strengths that a verdict names."""

# Sizes of what is compared, and what counts as equal.

LARGEST_INNOVATION = 5.0
"""Bound on innovations, in standard deviations, so that no outlier masks others; under the law one in two million
exceeds it."""

PRIOR_SD, TESTED_PRIOR_SD, FLAT_PRECISION = 1.5, 0.75, 1e-9
"""Standard deviation of a coordinate on the real line, about 0, by the default priors; that above which a prior is not
tested against the data; and the precision by a prior that says nothing."""

TARGET_SD, LARGEST_REMEDY = 0.1, 1e6
"""Standard deviation, on the real line, to which `identification` extrapolates the number of networks, and the factor
from which more networks are no remedy."""

EQUAL_NUMBERS, EQUAL_STARTS = 1e-6, 1e-4
"""Relative distance up to which numbers are equal that may have been stored in different types; and that up to which
covariances of different hidden states are the same start."""

PAIRED_NETWORKS = 64
"""Largest number of networks whose pairs are tested for shared weights."""

FEWEST_DRAWS, FEWEST_SMOOTHED = 4, 50
"""Number of draws below which there is neither an R-hat nor an interval, and below which weights are not smoothed."""

SKEWED_TRANSITIONS, SKEWED_DRAWS, FEWEST_REPEATS, MOST_REPEATS = 4096, 8192, 4, 64
"""Largest numbers of transitions whose skewness is tested, and of exact layers that are drawn from their starts; of
each start at least 4, which give a variance, and at most 64."""

NORMAL_BLOCKS, NORMALS_OF_A_BLOCK = 40, 100
"""Blocks of normal increments, and the number in each, of whose fourth moments the law is taken."""

LARGEST_ENTRY, NEAREST_LAYERS, EXACT_DRAWS = 1e6, 256, 96
"""Sizes for layers out of range: the entry of V from which it has exploded, the number of layers that are compared, and
of exact ones for each. The sd of 96 draws has an error of 7 %; with 24, 15 %, one of eight sets with shared weights
passed."""

COMPARED_FORMS, SIMULATED_SETS = 2**18, 16
"""Largest number of entries of the forms W_q to which other masks than the fitted one are fitted: 1,638 transitions of
4 tokens, 113 of 8, in 0.3 and 2 s the first time, where 1,024 of 8 tokens would take 11 s. And the number of simulated
data sets by which evidence is corrected."""
