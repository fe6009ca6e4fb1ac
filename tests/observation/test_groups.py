import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.observation import groups_of, read


@pytest.mark.parametrize("name", ["data.nc", "data.zarr"])
def test_groups_of_text_survive_a_file_in_the_order_of_their_first_networks(networks, name, tmp_path):
    if name == "data.zarr":
        pytest.importorskip("zarr")
    si.write(networks.assign_coords(group=("network", ["late", *["early"] * 23])), tmp_path / name)
    groups = groups_of(read(tmp_path / name))
    assert list(groups.labels) == ["late", "early"]
    np.testing.assert_array_equal(groups.group, [0, *[1] * 23])
    np.testing.assert_array_equal(groups.members(1), range(1, 24))
