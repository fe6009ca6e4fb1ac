"""Thresholds of the verdicts, with what they mean."""

import math

LEVEL = 0.01
"""False-alarm probability of each of the two tests of calibration."""

SHARED, SHARED_LEVEL = 0.01, 1e-3
"""Largest acceptable correlation between networks, and the false-alarm probability of its test: 64 networks with a
correlation of 0.01 have posterior standard deviations that are 1.3 times too small."""

MOVE = 1.0
"""Largest acceptable move of a parameter by a misfit, in posterior standard deviations."""

CONFLICT = 5.0
"""Distance of a prior from the data without it, in standard deviations of both, above which it contradicts them."""

EFFECT = 0.2
"""Root mean square of a misfit, in standard deviations of a layer's increments, above which layers are of something
else, whether or not it moves a parameter. Shaped layers at the edge of the law's range are below 0.1."""

SCATTER_RATIO = 1.5
"""Largest acceptable ratio of a standard deviation by the scatter of networks to that of the posterior."""

EVIDENCE = math.log(100)
"""Log evidence by which another architecture must exceed the fitted one, or fall short of it to be excluded."""

SPREAD = {"finite-width": 1.5, "limit": 0.75}
"""Largest acceptable mean spread of the logits in a row of the softmax, weighted by the information on τ0 (∝ s⁴)."""

BEYOND = LEVEL
"""Largest acceptable posterior probability that the softmax is out of range, where the data do not identify τ0."""

LEAST_USED, FEWEST_USED = 0.05, 0.01
"""Fraction of transitions inside the range of the law below which the others are compared with exact layers; and the
smallest acceptable one where they cannot be."""

MANY_LEFT_OUT = 0.5
"""Fraction of transitions left out above which a note says so."""

EXCLUDED = 6.0
"""Largest acceptable distance of layers outside the range from exact ones, in standard deviations of 96 draws."""

RHAT, ROUGH_RHAT = 1.05, 1.01
"""Upper bound on R-hat: the means of chains then differ by about 0.3 posterior sds. Above the second bound, means are
rough, and a note says so."""

ESS, ROUGH_ESS = 100, 400
"""Smallest acceptable effective sample size, for Monte Carlo errors of 0.1 posterior sds; below the second bound, means
are rough."""

DIVERGENT = 0.01
"""Largest acceptable fraction of divergent draws; they can move a mean by some hundredths of a posterior sd."""

BFMI = 0.3
"""Smallest acceptable BFMI (Bayesian fraction of missing information)."""

CONTRACTION = 0.5
"""Smallest acceptable contraction from prior to posterior variance."""

MANY = 1e6
"""Factor in the number of networks above which the advice does not suggest more networks."""

FEWEST_NETWORKS = 8
"""Smallest number of networks for the test of networks left out."""

FLOORS = 3.0
"""Largest acceptable distance from the SDE, in units of its floor; samples of one law are at 1 ± 0.5."""

DEVIATIONS = 4.0
"""Largest acceptable distance of the posterior mean from the truth, in posterior standard deviations."""
