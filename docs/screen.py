"""Draws what a terminal showed as an SVG picture: `python docs/screen.py TITLE < output > picture.svg`.

Reads the raw output of a program in a terminal, as ``script`` keeps it: text, colours, and the codes that move the cursor up and
erase a line, with which a progress bar is redrawn. With ``--until TEXT`` it stops at the first screen that shows the text, and
``--lines N`` keeps the last N lines.
"""

import argparse
import io
import re
import sys

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

CODES = re.compile(r"\r\n|\r|\n|\x1b\[\d*[AK]|\x1b\[\?25[hl]")
FONT = re.compile(r"@font-face \{\{.*?\}\}\n\s*\}\}|@font-face \{\{.*?\}\}", re.DOTALL)
"""A picture loads nothing, so its letters are the reader's own."""


def screens(output):
    """Yield the lines of the screen after each piece of text."""
    lines, at, position = [""], 0, 0
    for code in [*CODES.finditer(output), None]:
        lines[at] += output[position : code.start() if code else None]
        yield lines[: at + 1]
        if code is None:
            return
        position, kind = code.end(), code.group()
        if kind.endswith("A"):
            at = max(at - int(kind[2:-1] or 1), 0)
        elif kind == "\r" or kind.endswith("K"):
            lines[at] = ""
        elif kind.endswith("\n"):
            at += 1
            lines[at:] = [""]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("title")
    parser.add_argument("--until", help="the first screen that shows this text; without it the last one")
    parser.add_argument("--lines", type=int, default=40, help="how many lines to keep, from the end")
    arguments = parser.parse_args()
    for screen in screens(sys.stdin.read()):
        lines = screen
        if arguments.until and arguments.until in screen[-1]:
            break
    while not lines[-1].strip():
        lines = lines[:-1]
    text = Text("\n").join(Text.from_ansi(line) for line in lines[-arguments.lines :])
    width = max(len(line) for line in text.plain.splitlines())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(text)
    form = FONT.sub("", CONSOLE_SVG_FORMAT)
    sys.stdout.write(console.export_svg(title=arguments.title, code_format=form, unique_id="screen"))


if __name__ == "__main__":
    main()
