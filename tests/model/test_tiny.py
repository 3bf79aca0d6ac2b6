import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_memopt.model.tiny import SPECIALS, TURN_END, TURN_START, TinyShape, build_tokenizer, make_tiny_model

SMALLEST = TinyShape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, head_dim=16)


def test_the_default_is_a_qwen3_that_transformers_loads_and_generates_with(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    output = model.generate(**tokenizer(["7+5", "11+3"], return_tensors="pt", padding=True), max_new_tokens=3, do_sample=False)
    assert output.shape[0] == 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_only_when_asked(tmp_path, tied):
    shape = TinyShape(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, head_dim=16, tie_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", shape))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_vocabulary_may_be_larger_than_the_tokenizer(tmp_path):
    shape = TinyShape(vocab_size=1000, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, head_dim=16)
    folder = make_tiny_model(tmp_path / "model", shape)
    assert AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().num_embeddings == 1000
    assert len(AutoTokenizer.from_pretrained(folder)) == 320


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    weights = [
        (make_tiny_model(tmp_path / name, SMALLEST, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]
    assert weights[0] == weights[1] != weights[2]


def test_making_a_model_leaves_the_global_random_state_alone(tmp_path):
    before = torch.get_rng_state()
    make_tiny_model(tmp_path / "model", SMALLEST)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_older_model_at_the_place_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    make_tiny_model(tmp_path / "model", TinyShape(vocab_size=400, num_layers=1))
    folder = make_tiny_model(tmp_path / "model", SMALLEST)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 320
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


TOKENIZER = build_tokenizer()


@settings(max_examples=30)
@given(st.text())
def test_every_text_survives_a_round_trip(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.text(alphabet="0123456789+= ", min_size=1))
def test_each_digit_is_a_token_of_its_own(text):
    tokens = TOKENIZER.tokenize(text)
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in text if c.isdigit()]


def test_a_turn_is_rendered_as_chatml_and_its_markers_are_single_tokens():
    turn = [{"role": "user", "content": "7+5"}]
    text = TOKENIZER.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n"
    tokens = TOKENIZER.tokenize(text)
    assert tokens.count(TURN_START) == 2
    assert tokens.count(TURN_END) == 1


def test_a_generation_ends_with_the_turn_and_padding_is_another_token():
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.pad_token not in (TURN_END, TURN_START)
    assert TOKENIZER.padding_side == "left"


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    assert len(build_tokenizer(256 + len(SPECIALS))) == 259
    with pytest.raises(ValueError, match="259"):
        build_tokenizer(258)
