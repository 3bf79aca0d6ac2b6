import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from verl_memopt.model import export
from verl_memopt.model.export import SafetensorsWriter


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "fp32": torch.randn(5, 3, generator=generator),
        "bf16": torch.randn(7, generator=generator).bfloat16(),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


@pytest.mark.parametrize("chunk", [1, 10, 10_000])
def test_what_is_written_is_read_back_to_the_bit_in_any_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(export, "CHUNK_BYTES", chunk)
    with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
        for name, tensor in tensors().items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_that_was_not_finished_is_not_taken_for_a_whole_one(tmp_path):
    def write():
        with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
            for tensor in (torch.zeros(2), torch.zeros(2, dtype=torch.complex64)):
                writer.add(str(tensor.dtype), tensor)

    with pytest.raises(KeyError):
        write()
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "model.safetensors")


def test_a_header_that_is_full_takes_no_more_names(tmp_path):
    one = torch.zeros(1)
    with SafetensorsWriter(tmp_path / "model.safetensors") as writer:
        count = 0
        while writer.has_room(f"a.rather.long.name.of.a.layer.{count}", one):
            writer.add(f"a.rather.long.name.of.a.layer.{count}", one)
            count += 1
    assert count > 400
    assert len(load_file(tmp_path / "model.safetensors")) == count
