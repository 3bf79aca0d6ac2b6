import pytest

from verl_memopt.data.toy import make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The toy task as `verl-memopt toy` makes it, warm-up included."""
    return make_toy(tmp_path_factory.mktemp("toy") / "toy", seed=0)
