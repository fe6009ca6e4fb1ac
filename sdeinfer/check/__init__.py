"""Whether to believe a fit."""

from sdeinfer.check._agreement import agreement as agreement
from sdeinfer.check._check import Check as Check
from sdeinfer.check._check import Verdict as Verdict
from sdeinfer.check._check import check as check
from sdeinfer.check._check import observed as observed
from sdeinfer.check._distance import distance as distance
from sdeinfer.check._summary import HDI as HDI
from sdeinfer.check._summary import IDENTIFIED as IDENTIFIED
from sdeinfer.check._summary import known_truth as known_truth
from sdeinfer.check._summary import parameters_of as parameters_of
from sdeinfer.check._summary import summarise as summarise
