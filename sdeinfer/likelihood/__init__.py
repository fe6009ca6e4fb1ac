"""What networks with given parameters would show, as NumPyro distributions; all that is data is computed once."""

from sdeinfer.likelihood._full_path import FullPath as FullPath
from sdeinfer.likelihood._program import Program as Program
from sdeinfer.likelihood._program import observing as observing
from sdeinfer.likelihood._statistics import PathStatistics as PathStatistics
from sdeinfer.likelihood._statistics import path_statistics as path_statistics
from sdeinfer.likelihood._transitions import Transitions as Transitions
from sdeinfer.likelihood._transitions import transitions as transitions
