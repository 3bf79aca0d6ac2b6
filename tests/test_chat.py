"""``verl-memopt chat`` as a person meets it, with a model that knows nothing: what is asked, what is remembered, how it ends."""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from verl_memopt.cli import main
from verl_memopt.errors import UserError
from verl_memopt.run.chat import ChatOptions, open_chat, prompts_of, run_of, talk

GREEDY = {"temperature": 0.0, "max_tokens": 4, "system": None}


@pytest.fixture
def chat(tiny_folder):
    """Open a chat whose options differ from the least ones, and give it with what the model read, turn by turn."""

    def build(folder=tiny_folder, template=None, **options):
        opened = open_chat(folder, "cpu", False, ChatOptions(**GREEDY | options), template or {})
        opened.out, opened.read, opened.ids = io.StringIO(), [], []
        generate = opened.model.generate

        def kept(ids, **arguments):
            opened.read.append(opened.tokenizer.decode(ids[0]))
            opened.ids.append(ids[0].tolist())
            return generate(ids, **arguments)

        opened.model.generate = kept
        return opened

    return build


def turns(*texts):
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(texts)) + "<|im_start|>assistant\n"


def test_each_prompt_stands_alone_unless_the_conversation_is_remembered(chat):
    alone, remembering = chat(), chat(remembers=True)
    for opened in (alone, remembering):
        first = opened.say("1+1=")
        opened.say("2+2=")
    assert alone.read == [turns("1+1="), turns("2+2=")]
    assert remembering.read[1].count("<|im_start|>user") == 2
    assert remembering.read[1].startswith("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n" + first)


def test_an_answer_is_written_while_it_is_generated_and_ends_the_line(chat):
    opened = chat()
    answer = opened.say("1+1=")
    assert opened.out.getvalue() == answer + "\n"


def test_a_system_message_comes_first_and_template_arguments_are_those_of_the_run(chat):
    opened = chat(system="add", template={"tools": None})
    opened.say("1+1=")
    assert opened.read[0].startswith("<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1+1=")


def test_a_text_is_read_with_bos_and_special_tokens_that_a_person_types_are_text(chat):
    opened = chat()
    tokenizer = opened.tokenizer
    begin, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, begin)]
    )
    opened.answer("<|im_end|>1")
    opened.say("<|im_end|>1")
    of_text, of_chat = opened.ids
    assert (
        of_text == tokenizer("<|im_end|>1")["input_ids"] == [begin, end, *tokenizer("1", add_special_tokens=False)["input_ids"]]
    )
    assert (of_chat.count(end), of_chat[0]) == (1, tokenizer.convert_tokens_to_ids("<|im_start|>"))
    assert tokenizer.decode(of_chat) == turns("<|im_end|>1")


def test_without_a_template_a_text_is_continued_as_it_is(chat, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template is None
    opened = chat(tmp_path / "plain", remembers=True)
    opened.say("1+1=")
    opened.say("2+2=")
    assert opened.read == ["1+1=", "2+2="]


def test_a_conversation_that_is_too_long_starts_again_and_says_so(chat):
    opened = chat(remembers=True, system="add")
    opened.model.config.max_position_embeddings = 60
    for _ in range(3):
        opened.say("1+1=")
    assert "starts again" in opened.out.getvalue()
    assert opened.read[-1].count("<|im_start|>user") < 3
    assert opened.read[-1].startswith("<|im_start|>system\nadd")
    with pytest.raises(UserError, match="the model reads"):
        opened.say("1" * 100)


def test_what_is_piped_is_one_prompt_and_nothing_is_an_error(chat, monkeypatch):
    opened = chat()
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1=\nand 2\n"))
    assert talk(opened, None, None) == 0
    assert opened.read == [turns("1+1=\nand 2")]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(UserError, match="empty"):
        talk(opened, None, None)


def test_text_that_would_steer_the_terminal_is_written_as_codes(chat, monkeypatch):
    opened = chat()
    opened.tokenizer.decode = lambda *_, **__: "\x1b[2Jgone\x07"
    opened.say("1+1=")
    assert opened.out.getvalue() == "\\x1b[2Jgone\\x07\n"


def test_input_in_another_encoding_is_an_error_in_one_line(chat, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("größer".encode("latin-1")), encoding="utf-8"))
    with pytest.raises(UserError, match=r"^standard input is not utf-8: .*at byte 2"):
        talk(chat(), None, None)


def test_a_prompt_of_the_runs_data_is_its_last_sample_or_the_first_row(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "row"}]}) + "\n")
    (tmp_path / "config.yaml").write_text(
        f"data: {{val_files: null, train_files: {data}, prompt_key: prompt, apply_chat_template_kwargs: {{a: 1}}}}\n"
    )
    (tmp_path / "model").mkdir()
    assert prompts_of(run_of(tmp_path / "model")) == ([{"role": "user", "content": "row"}], {"a": 1})
    samples = [{"messages": None, "input": "text"}, {"messages": [{"role": "user", "content": "last"}], "input": "rendered"}]
    (tmp_path / "generations.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert prompts_of(run_of(tmp_path))[0] == [{"role": "user", "content": "last"}]
    data.unlink()
    (tmp_path / "generations.jsonl").unlink()
    assert prompts_of(run_of(tmp_path)) == prompts_of(None)


@pytest.mark.parametrize(("path", "named"), [("nowhere", "no such folder"), (".", "there is no checkpoint")])
def test_a_folder_without_a_model_is_named_in_one_line(tmp_path, capsys, path, named):
    assert main(["chat", str(tmp_path / path), "--prompt", "1"]) in (1, 2)
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert named in message


@pytest.mark.slow
@pytest.mark.parametrize(("last", "code"), [(b"\x04", 0), (b"\x03", 130)])
def test_in_a_terminal_enter_sends_the_example_and_ctrl_d_and_ctrl_c_end_it(tiny_folder, tmp_path, last, code):
    (tmp_path / "config.yaml").write_text("data: {apply_chat_template_kwargs: {}}\n")
    (tmp_path / "generations.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "7+7="}]}) + "\n")
    shutil.copytree(tiny_folder, tmp_path / "model")
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "verl_memopt", "chat", str(tmp_path), "--max-tokens", "3"]
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    shown, keys, deadline = b"", [b"\n", b"1+1=\n", last], time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:
                break
        elif keys and shown.rstrip(b" ").endswith(b">"):
            os.write(terminal, keys.pop(0))
    os.close(terminal)
    assert process.wait(30) == code, shown
    assert not keys
    text = shown.decode()
    assert "7+7=" in text
    assert "Traceback" not in text
