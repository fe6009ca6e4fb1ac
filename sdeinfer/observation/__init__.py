"""Observed networks: hidden states or files reduced to one validated Dataset."""

from sdeinfer.observation._chunks import Chunk as Chunk
from sdeinfer.observation._chunks import Inspected as Inspected
from sdeinfer.observation._chunks import chunks_of as chunks_of
from sdeinfer.observation._chunks import in_chunks as in_chunks
from sdeinfer.observation._chunks import refuse as refuse
from sdeinfer.observation._chunks import require_loaded as require_loaded
from sdeinfer.observation._dataset import DIMS as DIMS
from sdeinfer.observation._dataset import INCOMPLETE as INCOMPLETE
from sdeinfer.observation._dataset import covariance_dataset as covariance_dataset
from sdeinfer.observation._dataset import truth_of as truth_of
from sdeinfer.observation._dataset import validate as validate
from sdeinfer.observation._dataset import validate_labels as validate_labels
from sdeinfer.observation._groups import Groups as Groups
from sdeinfer.observation._groups import blocks_of_layers as blocks_of_layers
from sdeinfer.observation._groups import groups_of as groups_of
from sdeinfer.observation._observe import observe as observe
from sdeinfer.observation._observer import Observer as Observer
from sdeinfer.observation._outputs import observe_outputs as observe_outputs
from sdeinfer.observation._outputs import outputs_of as outputs_of
from sdeinfer.observation._precision import LowPrecisionWarning as LowPrecisionWarning
from sdeinfer.observation._store import read as read
from sdeinfer.observation._store import read_posterior as read_posterior
from sdeinfer.observation._store import write as write
from sdeinfer.observation._store import write_parts as write_parts
from sdeinfer.observation._stored import observe_file as observe_file
from sdeinfer.observation._take import take as take
