"""The command ``verl-memopt samples``: shows the answers of a run in the terminal, turn by turn or token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from verl_memopt.data.encoder import decode
from verl_memopt.errors import UserError
from verl_memopt.model.folder import read_tokenizer
from verl_memopt.observe.files import read_rows
from verl_memopt.observe.own_files import is_there
from verl_memopt.observe.run_folder import FINAL_MODEL

GENERATIONS = "generations.jsonl"
STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
SAMPLED, READ = "bold green", "dim"


def show_samples(source: Path, step: int | None, number: int, tokens: bool, tokenizer: Path | None) -> None:
    """Print samples of a run folder, or of a file of samples.

    Args:
        source: A run folder, or a .jsonl file of samples.
        step: Only the samples of this step. None = the last step.
        number: Largest number of samples that are printed.
        tokens: Print the tokens that the model read and sampled, and not the messages.
        tokenizer: Folder of the tokenizer. None = that of the run.

    Raises:
        UserError: There are no samples, or the tokenizer is missing.
    """
    file = source if source.is_file() else source / GENERATIONS
    rows = [row for row in read_rows(file) if "response_ids" in row] if is_there(file) else []
    if not rows:
        raise UserError(f"{file}: there are no samples. Give a run folder, or a file of trainer.rollout_data_dir.")
    shown = rows[-1]["step"] if step is None else step
    chosen = [row for row in rows if row["step"] == shown]
    if not chosen:
        steps = ", ".join(map(str, dict.fromkeys(row["step"] for row in rows)))
        raise UserError(f"{file}: there are no samples of step {shown}. There are samples of {steps}.")
    console, read = Console(highlight=False), None
    if tokens:
        read = _tokenizer(source, tokenizer)
        console.print(
            Text.assemble((_marked("sampled by the model", console.color_system is not None), SAMPLED), ", ", ("read", READ))
        )
    for row in chosen[:number]:
        console.print(_head(row))
        for line in _turns(row, read, console.color_system is not None) if read is not None else _messages(row):
            console.print(line)
    if len(chosen) > number:
        console.print(f"{len(chosen) - number} more samples of step {shown} (--number)")


def _tokenizer(source: Path, given: Path | None) -> Any:
    folder = source / FINAL_MODEL if given is None else given
    if not is_there(folder):
        raise UserError(f"--tokens: there is no tokenizer in {folder}. Give its folder as --tokenizer.")
    return read_tokenizer(folder, "--tokenizer", False)


def _head(row: Mapping[str, Any]) -> Text:
    extra = {name: row[name] for name in ("environment_reward",) if name in row}
    facts = {"step": row["step"], "prompt": row["uid"], "score": row["score"], **extra, "answer": row["gts"]}
    facts |= {"ended": row.get("ended") or row["finish_reason"]}
    return Text("\n" + "  ".join(f"{name}={value}" for name, value in facts.items() if value is not None), style="bold")


def _messages(row: Mapping[str, Any]) -> Iterator[Text]:
    turns = row.get("conversation") or [
        *(row.get("messages") or [{"role": "user", "content": row["input"]}]),
        {"role": "assistant", "content": row["output"]},
    ]
    for turn in turns:
        style = STYLES.get(turn["role"], "")
        text = str(turn.get("content") or "")
        for call in turn.get("tool_calls") or ():
            function = call["function"]
            arguments = ", ".join(f"{name}={value!r}" for name, value in dict(function["arguments"]).items())
            text += f"{' ' if text else ''}-> {function['name']}({arguments})"
        yield Text.assemble((f"{turn['role']:>9}  ", f"{style} bold"), (text.replace("\n", "\n           "), style))


def _marked(sampled: str, colored: bool) -> str:
    return sampled if colored else f"[[{sampled}]]"


def _turns(row: Mapping[str, Any], tokenizer: Any, colored: bool) -> Iterator[Text]:
    """Yield one text per turn. What a turn shares with the turn before it is printed once."""
    response, place = list(row["response_ids"]), 0
    turns: Sequence[Mapping[str, Any]] = row.get("turns") or [{"kept": 0, "new_ids": row["prompt_ids"], "sampled": len(response)}]
    for number, turn in enumerate(turns, start=1):
        sampled = response[place : place + turn["sampled"]]
        place += turn["sampled"]
        head = f"turn {number}: goes on after {turn['kept']} tokens, reads {len(turn['new_ids'])}, samples {len(sampled)}"
        yield Text(head, style="italic")
        yield Text.assemble((decode(tokenizer, turn["new_ids"]), READ), (_marked(decode(tokenizer, sampled), colored), SAMPLED))
