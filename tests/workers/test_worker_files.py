import pytest

from tests.workers.test_worker import ALL, call, made, mini_batch, same, weights  # noqa: F401


def test_a_saved_policy_comes_back_bit_for_bit(made, tmp_path):  # noqa: F811
    worker = made()
    records = call(worker, "save", str(tmp_path), ALL)
    assert records.keys() == {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    saved = weights(worker)
    call(worker, "update_actor", [mini_batch()])
    assert not same(weights(worker), saved)
    call(worker, "load", str(tmp_path), ALL)
    assert same(weights(worker), saved)


@pytest.mark.parametrize("with_weights", [False, True])
def test_an_export_has_weights_where_they_are_asked_for(made, tmp_path, with_weights):  # noqa: F811
    call(made(), "save", str(tmp_path), ["hf_model"] if with_weights else [])
    assert (tmp_path / "huggingface" / "config.json").is_file()
    assert bool(list(tmp_path.glob("huggingface/*.safetensors"))) is with_weights
