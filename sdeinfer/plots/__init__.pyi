from ._agreement import plot_agreement as plot_agreement
from ._correlations import correlation_bands as correlation_bands
from ._correlations import pair_correlations as pair_correlations
from ._correlations import plot_correlation_paths as plot_correlation_paths
from ._correlations import plot_terminal_correlation as plot_terminal_correlation
from ._innovations import plot_innovations as plot_innovations
from ._posterior import plot_posterior as plot_posterior
from ._posterior import plot_ranks as plot_ranks
