"""Observed networks: from hidden states or files to one validated Dataset."""

from sdeinfer.observe._dataset import DIMS as DIMS
from sdeinfer.observe._dataset import covariance_dataset as covariance_dataset
from sdeinfer.observe._dataset import truth_of as truth_of
from sdeinfer.observe._dataset import validate as validate
from sdeinfer.observe._groups import Groups as Groups
from sdeinfer.observe._groups import blocks_of_layers as blocks_of_layers
from sdeinfer.observe._groups import groups_of as groups_of
from sdeinfer.observe._observe import observe as observe
from sdeinfer.observe._observer import Observer as Observer
from sdeinfer.observe._outputs import observe_outputs as observe_outputs
from sdeinfer.observe._outputs import outputs_of as outputs_of
from sdeinfer.observe._precision import LowPrecisionWarning as LowPrecisionWarning
from sdeinfer.observe._store import read as read
from sdeinfer.observe._store import read_posterior as read_posterior
from sdeinfer.observe._store import write as write
from sdeinfer.observe._store import write_parts as write_parts
from sdeinfer.observe._stored import observe_file as observe_file
