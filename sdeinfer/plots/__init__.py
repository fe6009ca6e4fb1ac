"""Figures of a fit; each function takes the result of `fit` and returns a matplotlib figure."""

from sdeinfer.plots._agreement import plot_agreement as plot_agreement
from sdeinfer.plots._correlations import correlation_bands as correlation_bands
from sdeinfer.plots._correlations import pair_correlations as pair_correlations
from sdeinfer.plots._correlations import plot_correlation_paths as plot_correlation_paths
from sdeinfer.plots._correlations import plot_terminal_correlation as plot_terminal_correlation
from sdeinfer.plots._innovations import plot_innovations as plot_innovations
from sdeinfer.plots._posterior import plot_posterior as plot_posterior
from sdeinfer.plots._posterior import plot_ranks as plot_ranks
