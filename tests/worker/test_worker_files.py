import pytest

from tests.worker.test_worker import ALL, call, made, mini_batch, same, weights  # noqa: F401


@pytest.mark.parametrize("with_weights", [False, True])
def test_an_export_has_weights_where_they_are_asked_for(made, tmp_path, with_weights):  # noqa: F811
    call(made(), "save", str(tmp_path), ["hf_model"] if with_weights else [])
    assert (tmp_path / "huggingface" / "config.json").is_file()
    assert bool(list(tmp_path.glob("huggingface/*.safetensors"))) is with_weights
