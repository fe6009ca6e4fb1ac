"""Whether to believe a fit."""

from sdeinfer.check._agreement import agreement as agreement
from sdeinfer.check._check import EVERY_LAYER as EVERY_LAYER
from sdeinfer.check._check import LEVEL as LEVEL
from sdeinfer.check._check import check as check
from sdeinfer.check._check import observed as observed
from sdeinfer.check._design import Design as Design
from sdeinfer.check._design import design as design
from sdeinfer.check._design import network_information as network_information
from sdeinfer.check._distance import distance as distance
from sdeinfer.check._identification import identification as identification
from sdeinfer.check._innovations import innovation_tests as innovation_tests
from sdeinfer.check._predictive import distance_from_theory as distance_from_theory
from sdeinfer.check._predictive import left_out_transforms as left_out_transforms
from sdeinfer.check._summary import HDI as HDI
from sdeinfer.check._summary import IDENTIFIED as IDENTIFIED
from sdeinfer.check._summary import known_truth as known_truth
from sdeinfer.check._summary import parameters_of as parameters_of
from sdeinfer.check._summary import summarise as summarise
from sdeinfer.check._verdict import Check as Check
from sdeinfer.check._verdict import Topic as Topic
from sdeinfer.check._verdict import Verdict as Verdict
