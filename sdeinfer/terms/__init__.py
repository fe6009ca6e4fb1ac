"""The terms of the covariance SDE, one per file, and their sum."""

from sdeinfer.terms._attention import Attention as Attention
from sdeinfer.terms._attention import AttentionStrength as AttentionStrength
from sdeinfer.terms._attention import attention_drift as attention_drift
from sdeinfer.terms._attention import attention_drift_vectors as attention_drift_vectors
from sdeinfer.terms._attention import centred_norms as centred_norms
from sdeinfer.terms._base import AbstractTerm as AbstractTerm
from sdeinfer.terms._base import AddedKernel as AddedKernel
from sdeinfer.terms._base import is_present as is_present
from sdeinfer.terms._limit import Limit as Limit
from sdeinfer.terms._limit import LimitSteps as LimitSteps
from sdeinfer.terms._linear import LinearNoise as LinearNoise
from sdeinfer.terms._relu import ShapedReLU as ShapedReLU
from sdeinfer.terms._relu import joint_relu_drift as joint_relu_drift
from sdeinfer.terms._relu import relu_alignment as relu_alignment
from sdeinfer.terms._relu import relu_drift as relu_drift
