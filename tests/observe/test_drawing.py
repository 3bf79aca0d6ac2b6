import pytest

from verl_memopt.errors import UserError
from verl_memopt.observe.charts import figure, save

MIB, GIB = 2**20, 2**30


def test_a_picture_that_the_disk_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"bars\.png: cannot be written \(No such file or directory"):
        save(figure(2, 2), tmp_path / "missing" / "bars.png")
