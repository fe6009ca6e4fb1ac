"""The terms of the covariance SDE, one per file, and their sum."""

from sdeinfer.terms._base import AbstractTerm as AbstractTerm
