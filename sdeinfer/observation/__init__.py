"""Observed networks: hidden states or files reduced to one validated Dataset."""

from sdeinfer.observation._branch_observer import BranchObserver as BranchObserver
from sdeinfer.observation._branch_observer import joined_branches as joined_branches
from sdeinfer.observation._branches import branches_dataset as branches_dataset
from sdeinfer.observation._branches import validate_branches as validate_branches
from sdeinfer.observation._dataset import covariance_dataset as covariance_dataset
from sdeinfer.observation._dataset import observe_outputs as observe_outputs
from sdeinfer.observation._dataset import validate as validate
from sdeinfer.observation._dataset import validate_tokens as validate_tokens
from sdeinfer.observation._doubts import LowPrecisionWarning as LowPrecisionWarning
from sdeinfer.observation._observe import observe as observe
from sdeinfer.observation._observe import observe_branches as observe_branches
from sdeinfer.observation._observer import Observer as Observer
from sdeinfer.observation._observer import take as take
from sdeinfer.observation._store import read as read
from sdeinfer.observation._store import read_posterior as read_posterior
from sdeinfer.observation._store import write as write
