import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.ranks import run_ranks
from tests.workers.test_policy import batch
from tests.workers.test_worker import ALL, AR, call, made, mini_batch, place, plan_of, same, weights  # noqa: F401 - made is a fixture
from verl_memopt.algorithms.reductions import GlobalCounts
from verl_memopt.distributed.file_records import record_folder
from verl_memopt.distributed.process_group import leave_process_group
from verl_memopt.errors import CheckpointError
from verl_memopt.workers.trained_model import MiniBatch
from verl_memopt.workers.worker import Worker


def test_a_loaded_worker_goes_on_bit_for_bit(made, tmp_path):  # noqa: F811
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path), ALL)
    metrics = call(worker, "update_actor", [mini_batch()])
    leave_process_group()
    other = made()
    call(other, "load", str(tmp_path), ALL)
    assert call(other, "update_actor", [mini_batch()]) == metrics
    assert same(weights(worker), weights(other))


def test_a_checkpoint_holds_a_model_folder_with_weights_only_when_asked(made, tmp_path, tiny_folder):  # noqa: F811
    worker = made()
    call(worker, "save", str(tmp_path / "plain"), ALL)
    call(worker, "save", str(tmp_path / "whole"), [*ALL, "hf_model"])
    plain, whole = (tmp_path / name / "huggingface" for name in ("plain", "whole"))
    for folder in (plain, whole):
        assert (folder / "config.json").is_file()
        assert (folder / "tokenizer.json").is_file()
    assert not list(plain.glob("*.safetensors"))
    assert same(load_file(whole / "model.safetensors"), weights(worker))


@pytest.mark.parametrize("more", [{}, {f"{AR}.model.lora_rank": 2}])
def test_a_save_answers_with_the_record_of_every_file(made, tmp_path, more):  # noqa: F811
    assert call(made(more), "save", str(tmp_path), [*ALL, "hf_model"]) == record_folder(tmp_path, tmp_path)


def test_a_saved_tokenizer_renders_prompts_as_the_run_did(made, tmp_path):  # noqa: F811
    template = "{{ messages[0]['content'] }} ->"
    call(made({f"{AR}.model.custom_chat_template": template}), "save", str(tmp_path), ["model"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "huggingface")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "1+1= ->"


def test_a_model_folder_that_cannot_be_written_is_an_error_for_the_user(made, tmp_path):  # noqa: F811
    worker = made()
    (tmp_path / "huggingface").write_text("a file where a folder must be")
    with pytest.raises(CheckpointError, match=r"the model could not be written: .*huggingface"):
        call(worker, "save", str(tmp_path), ["model"])


def two_ranks(rank, folder, out):
    """Loads what one rank wrote, takes a step, saves and gives what this rank computed."""
    worker = Worker(plan_of(folder), place(rank, 2))
    worker.load(str(out / "one"), ALL)
    whole = batch(rows=4)
    counts = GlobalCounts(float(whole.responses.lengths.sum()), 4.0)
    metrics = worker.update_actor([MiniBatch(whole.select([2 * rank, 2 * rank + 1]), [[0, 1]], counts)])
    worker.save(str(out / "two"), ALL)
    return metrics


def test_another_number_of_ranks_goes_on_from_a_checkpoint_and_back(made, tiny_folder, tmp_path):  # noqa: F811
    worker = made()
    call(worker, "update_actor", [mini_batch()])
    call(worker, "save", str(tmp_path / "one"), ALL)
    expected = call(worker, "update_actor", [mini_batch()])
    answers = run_ranks(two_ranks, 2, tiny_folder, tmp_path)
    assert sum(answer["actor/loss"] for answer in answers) == pytest.approx(expected["actor/loss"], rel=1e-5)
    for answer in answers:
        assert answer["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
        assert answer["actor/lr"] == expected["actor/lr"]
    assert sorted(path.name for path in (tmp_path / "two").glob("extra*")) == ["extra_rank_0.pt", "extra_rank_1.pt"]
    leave_process_group()
    back = made()
    call(back, "load", str(tmp_path / "two"), ALL)
    for name, tensor in weights(back).items():
        torch.testing.assert_close(tensor, weights(worker)[name], rtol=0, atol=2e-5)
