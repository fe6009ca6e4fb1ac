"""The figure of a transfer, through what it draws."""

import numpy as np
import pandas as pd
import pytest

import sdeinfer as si
from sdeinfer.tuning import Transfer

DEPTHS, WIDTHS = (16, 64), (128, 256)


def transfer(*, rules: bool) -> Transfer:
    table = pd.MultiIndex.from_product([WIDTHS, DEPTHS], names=["width", "depth"]).to_frame(index=False)
    depth = table["depth"]
    by_rule = table.assign(tuned=0.3, constant=0.2, **{"d^-1/2": 1.6 / depth**0.5, "d^-1": 12.8 / depth})
    criteria = table.assign(criterion="P(norm factor < 2) ≥ 0.95", bound=0.95, promised=0.9 + depth / 1e3)
    criteria = criteria.assign(promised_error=0.01, chain=0.91, chain_error=0.01, weights=np.nan, weights_error=np.nan)
    return Transfer(criteria.set_index(["width", "depth", "criterion"]), by_rule if rules else None)


def test_a_panel_for_each_criterion_and_one_for_the_rules():
    criterion, rules = transfer(rules=True).plot()
    lines = {line.get_label(): line for line in criterion.lines}
    np.testing.assert_allclose(lines["n = 128, promised"].get_ydata(), [0.916, 0.964])
    np.testing.assert_allclose(lines["bound"].get_ydata(), 0.95)
    assert len(criterion.containers) == len(WIDTHS)  # chains; networks with weights have no values
    looks = {
        (lines[label].get_linestyle(), lines[label].get_color()) for label in lines if str(label).endswith("promised")
    }
    assert len({style for style, _ in looks}) == len(WIDTHS)
    drawn = {line.get_label(): line.get_ydata() for line in rules.lines}
    np.testing.assert_allclose(drawn["γ ∝ d^-1/2"], [0.4, 0.2])
    np.testing.assert_allclose(drawn["tuned, n = 256"], [0.3, 0.3])


def test_without_rules_there_is_one_panel_less():
    assert len(transfer(rules=False).plot()) == 1


def test_another_number_of_axes_is_refused():
    with pytest.raises(si.InputError, match="axes: 2 are needed, got 0"):
        transfer(rules=True).plot(axes=[])
