"""Talk to a trained model in the terminal: ``verl-memopt chat``. Transformers computes the answers, on a CPU or a GPU."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from transformers import AutoConfig, AutoTokenizer, TextStreamer
from transformers.utils import logging as transformers_logging

from verl_memopt.data.encoder import special_tokens_of, tokenize
from verl_memopt.data.messages import Messages, is_chat, read_messages, render
from verl_memopt.data.python_rows import IN_PYTHON
from verl_memopt.data.sources import checked_files, rows_of
from verl_memopt.distributed.device import resolve_device
from verl_memopt.errors import UserError, printable
from verl_memopt.model.folder import refuse_odd_files
from verl_memopt.model.text_part import auto_class
from verl_memopt.model.weights import check_dtypes
from verl_memopt.observe.run_folder import FINAL_MODEL
from verl_memopt.records import parse_json
from verl_memopt.run.checkpoints import is_checkpoint
from verl_memopt.run.export_model import StoredModel, export_model, held_checkpoint

STOPPED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are generated.

    Attributes:
        temperature: Divides the logits before sampling; 0 = the most likely token. None = as the model's generation config says.
        max_tokens: Largest number of tokens in an answer.
        system: Text of a system message. None = no system message.
        remembers: A prompt continues the conversation. False = each prompt begins a new one, as in training.
    """

    temperature: float | None
    max_tokens: int
    system: str | None
    remembers: bool = False


@dataclass
class Chat:
    """A dialogue with a model. Without a chat template the model continues each text directly, and nothing is remembered.

    ``template``: further arguments of the chat template, those with which the run rendered its prompts. ``out``: None = standard
    output.
    """

    model: Any
    tokenizer: Any
    options: ChatOptions
    template: Mapping[str, Any] = field(default_factory=dict)
    out: IO[str] | None = None

    def __post_init__(self) -> None:
        self.messages: Messages = []

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def say(self, text: str) -> str:
        if not self.has_template:
            return self.answer(text)
        system = [] if self.messages or self.options.system is None else [{"role": "system", "content": self.options.system}]
        return self.turn([*system, {"role": "user", "content": text}])

    def turn(self, added: Messages) -> str:
        conversation = [*self.messages, *added]
        ids = self._rendered(conversation)
        if len(ids) + self.options.max_tokens > self._longest() and self.messages:
            self._write("(the conversation is longer than the model allows; it starts again here)\n")
            system = [message for message in self.messages[:1] if message["role"] == "system"]
            conversation = [*system, *added]
            ids = self._rendered(conversation)
        answer = self._generate(ids)
        if self.options.remembers:
            self.messages = [*conversation, {"role": "assistant", "content": answer}]
        return answer

    def answer(self, text: str) -> str:
        # Continue a text without a chat template. Write the continuation and return it.
        return self._generate(tokenize(self.tokenizer, [text], whole=True)[0])

    def _rendered(self, messages: Messages) -> list[int]:
        special = special_tokens_of(self.tokenizer)
        try:
            read = read_messages(messages, "the conversation")
            if read is None:
                raise UserError(f"{messages!r:.200} is no conversation. Give a list of {{role, content}}.")
            arguments = {"add_generation_prompt": True, **self.template}
            text, plain = render(special, self.tokenizer, read, special.count(read) > 0, arguments)
        except UserError:
            raise
        except Exception as error:  # a template may raise any error, and may accept another conversation
            raise UserError(f"the chat template of the model cannot render this conversation: {error}.") from error
        return tokenize(self.tokenizer, [text], [plain])[0]

    def _longest(self) -> int:
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31)

    def _generate(self, ids: Sequence[int]) -> str:
        room = self._longest() - len(ids)
        if not ids or room <= 0:
            raise UserError(f"the prompt has {len(ids)} tokens, and the model reads 1 to {self._longest() - 1}.")
        temperature = self.options.temperature
        sampling: dict[str, Any] = {}
        if temperature is not None:
            sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        prompt = torch.tensor([list(ids)], device=self.model.device)
        streamer = _Streamer(self.tokenizer, self._write)
        with torch.inference_mode():
            output = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=min(self.options.max_tokens, room),
                pad_token_id=self.tokenizer.pad_token_id, streamer=streamer, **sampling,
            )  # fmt: skip
        text: str = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return text

    def _write(self, text: str) -> None:
        out = self.out or sys.stdout
        out.write(printable(text))
        out.flush()


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text + ("\n" if stream_end else ""))


# The inputs of a chat: the folder of a model, and the data of its run.


@contextlib.contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """Yield the model folder of a path: the path itself, a run's ``model/``, or a folder to which a checkpoint is exported."""
    path = path.expanduser()
    if not path.is_dir():
        raise UserError(f"{path}: no such folder. Give a run folder, a model folder or a global_step_N folder.")
    ready = next((folder for folder in (path, path / FINAL_MODEL) if (folder / "config.json").is_file()), None)
    if ready is not None and not is_checkpoint(path):
        yield ready
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / FINAL_MODEL
        with held_checkpoint(path, None) as checkpoint:
            export_model(StoredModel(checkpoint), folder)
        yield folder


def run_of(path: Path) -> Path | None:
    # The path may be the run folder or a folder directly inside it.
    path = path.expanduser().resolve()
    return next((folder for folder in (path, path.parent) if (folder / "config.yaml").is_file()), None)


def prompts_of(run: Path | None) -> tuple[Messages | str | None, Mapping[str, Any]]:
    """Return a prompt of a run's data, and the arguments of the chat template.

    The prompt is a list of messages, or a text that is already rendered. If they cannot be read, None and {} are returned,
    because a chat works without them.
    """
    if run is None:
        return None, {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, UserError):
        data = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["data"]
        template = dict(data.get("apply_chat_template_kwargs") or {})
        return _sample(run) or _first_row(data), template
    return None, {}


def _sample(run: Path) -> Messages | str | None:
    path = run / "generations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        return None
    row = parse_json(lines[-1], dict[str, Any])
    found: Messages | str | None = row.get("messages") or row.get("input")
    return found


def _first_row(data: Mapping[str, Any]) -> Messages | str | None:
    files, key = data.get("val_files") or data["train_files"], "data.val_files"
    if files == IN_PYTHON:
        return None
    _, columns = next(rows_of(checked_files(files, key), key))
    prompt = columns.get(data["prompt_key"])
    return prompt if isinstance(prompt, str) or is_chat(prompt) else None


# The dialogue.


def open_chat(folder: Path, device: str, trust_remote_code: bool, options: ChatOptions, template: Mapping[str, Any]) -> Chat:
    transformers_logging.disable_progress_bar()
    refuse_odd_files(folder, str(folder))
    check_dtypes(folder, str(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind = auto_class(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
        model: Any = kind.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code)
    except Exception as error:  # code in the model folder may raise any error
        raise UserError(f"{folder}: the model cannot be loaded: {error}.") from error
    return Chat(model.to(resolve_device(device)).eval(), tokenizer, options, template)


def talk(chat: Chat, example: Messages | str | None, prompt: str | None) -> int:
    """Answer ``prompt``. Without one, answer the text of standard input, or on a terminal the lines that a person types.

    ``example``: a prompt of the run's data. An empty line sends it.
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = _read(sys.stdin.read).strip()
        if not prompt:
            raise UserError("standard input is empty. Give a prompt: echo 'Why is the sky blue?' | verl-memopt chat RUN.")
    if prompt is not None:
        chat.say(prompt)
        return 0
    alone = "/new forgets the conversation." if chat.options.remembers else "Each stands alone, as in training (--remember)."
    sys.stdout.write(f"Type a prompt. {alone} Ctrl-D ends the chat.\n")
    if example is not None:
        sys.stdout.write(f"A prompt of the run's data; Enter sends it:\n\n{_indented(_shown(example))}\n\n")
    while True:
        try:
            line = _read(lambda: input("> ")).strip()
        except EOFError:
            sys.stdout.write("\n")
            return 0
        try:
            if line == "/new":
                chat.messages = []
            elif line:
                chat.say(line)
            elif isinstance(example, str):
                chat.answer(example)
            elif example is not None:
                chat.messages = []
                chat.turn(example)
        except UserError as error:
            sys.stdout.write(f"{error}\n")


def _read(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not {error.encoding}: {error.reason} at byte {error.start}. Send UTF-8.") from error


def _shown(example: Messages | str) -> str:
    return printable(example if isinstance(example, str) else "\n".join(str(message["content"]) for message in example))


def _indented(text: str) -> str:
    width = shutil.get_terminal_size().columns
    lines = text.splitlines()[:12]
    return "\n".join(f"  {line[: max(width - 4, 20)]}" for line in lines) + (
        "\n  ..." if len(text.splitlines()) > len(lines) else ""
    )


@contextlib.contextmanager
def own_interrupts() -> Iterator[None]:
    # Ctrl-C ends the body. Without this, the command line's signal watch would handle it, and say that it stops a run.
    wakeup = signal.set_wakeup_fd(-1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)


def chat(path: Path, prompt: str | None, device: str, trust_remote_code: bool, options: ChatOptions) -> int:
    """Run ``verl-memopt chat`` and return the exit code.

    ``path``: a run folder, a model folder or a checkpoint. ``prompt``: None = read standard input.
    """
    try:
        with own_interrupts():
            example, template = prompts_of(run_of(path))
            with model_folder(path) as folder:
                opened = open_chat(folder, device, trust_remote_code, options, template)
            return talk(opened, example, prompt)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return STOPPED
