"""Scripts that let a shell complete commands, their options and settings: ``verl-memopt completion bash|zsh|fish``.

The script contains all words, so pressing Tab starts no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PROGRAM = "verl-memopt"


@dataclass(frozen=True)
class Completed:
    """The help line of a command, its options, and whether it takes settings."""

    help: str
    options: Sequence[str]
    takes_settings: bool


Commands = Mapping[str, Completed]


def script_of(shell: str, commands: Commands, settings: Sequence[str]) -> str:
    # The completion script of a shell. ``settings``: each entry is a key with an equal sign, or a whole override.
    return SHELLS[shell](commands, settings)


def _bash(commands: Commands, settings: Sequence[str]) -> str:
    options = "\n".join(f"    {name}) options='{' '.join(command.options)}' ;;" for name, command in commands.items())
    return f"""# eval "$({PROGRAM} completion bash)", for example in ~/.bashrc
_verl_memopt() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(commands)} --help --version' -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{options}
  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "$options --help" -- "$word")); return ;;
  esac
  case ${{COMP_WORDS[1]}} in
    {"|".join(_with_settings(commands))})
      [ "${{COMP_WORDS[COMP_CWORD - 1]}}" = = ] || [ "$word" = = ] && return
      COMPREPLY=($(compgen -W '{" ".join(settings)}' -- "$word"))
      [[ ${{COMPREPLY[0]-}} != *= ]] || compopt -o nospace 2>/dev/null ;;
  esac
}}
complete -o default -F _verl_memopt {PROGRAM}
"""


def _zsh(commands: Commands, settings: Sequence[str]) -> str:
    options = "\n".join(f"    {name}) options=({' '.join(command.options)} --help) ;;" for name, command in commands.items())
    return f"""#compdef {PROGRAM}
# eval "$({PROGRAM} completion zsh)", for example in ~/.zshrc after compinit
_verl_memopt() {{
  local -a options
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(commands)} --help --version
    return
  fi
  case $words[2] in
{options}
  esac
  if [[ $PREFIX == -* ]]; then
    compadd -- $options
    return
  fi
  case $words[2] in
    {"|".join(_with_settings(commands))})
      local -i found=0
      compadd -S '' -- {" ".join(setting for setting in settings if setting.endswith("="))} && found=1
      compadd -- {" ".join(setting for setting in settings if not setting.endswith("="))} && found=1
      (( found )) && return
      compset -P '*=' ;;
  esac
  _files
}}
compdef _verl_memopt {PROGRAM}
"""


def _fish(commands: Commands, settings: Sequence[str]) -> str:
    lines = [f"# {PROGRAM} completion fish | source, for example in ~/.config/fish/config.fish"]
    lines += [
        f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a {name} -d '{command.help.replace(chr(39), '')}'"
        for name, command in commands.items()
    ]
    for name, command in commands.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c {PROGRAM} {seen} -l {option.removeprefix('--')}" for option in command.options]
    seen = f"-n '__fish_seen_subcommand_from {' '.join(_with_settings(commands))}'"
    return "\n".join([*lines, f"complete -c {PROGRAM} {seen} -a '{' '.join(settings)}'"]) + "\n"


def _with_settings(commands: Commands) -> list[str]:
    return [name for name, command in commands.items() if command.takes_settings]


SHELLS: dict[str, Callable[[Commands, Sequence[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
