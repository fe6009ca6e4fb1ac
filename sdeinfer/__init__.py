"""Bayesian inference for the neural covariance SDE of shaped Transformers."""

from sdeinfer import models as models  # pyright: ignore[reportAttributeAccessIssue]
from sdeinfer._files import InputError as InputError
from sdeinfer.check import agreement as agreement
from sdeinfer.check import check as check
from sdeinfer.check import design as design
from sdeinfer.check import distance as distance
from sdeinfer.check import summarise as summarise
from sdeinfer.covariance import equicorrelated as equicorrelated
from sdeinfer.infer import Checkpoint as Checkpoint
from sdeinfer.infer import approximate as approximate
from sdeinfer.infer import compare as compare
from sdeinfer.infer import fit as fit
from sdeinfer.layers import Architecture as Architecture
from sdeinfer.layers import ResidualFeedForward as ResidualFeedForward
from sdeinfer.layers import ShapedAttention as ShapedAttention
from sdeinfer.layers import ShapedMLP as ShapedMLP
from sdeinfer.layers import ShapedTransformer as ShapedTransformer
from sdeinfer.layers import Stack as Stack
from sdeinfer.networks import sample_networks as sample_networks
from sdeinfer.networks import sample_outputs as sample_outputs
from sdeinfer.observe import LowPrecisionWarning as LowPrecisionWarning
from sdeinfer.observe import Observer as Observer
from sdeinfer.observe import covariance_dataset as covariance_dataset
from sdeinfer.observe import observe as observe
from sdeinfer.observe import observe_outputs as observe_outputs
from sdeinfer.observe import read as read
from sdeinfer.observe import validate as validate
from sdeinfer.observe import write as write
from sdeinfer.solve import simulate as simulate
from sdeinfer.solve import simulate_from as simulate_from
from sdeinfer.solve import simulate_stopped as simulate_stopped
