"""What happens to a page while the site is built: formulas become MathML, and keys in tables may break between their parts.

So a browser needs neither a script nor a network for a formula.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of a formula.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)


def on_page_content(text: str, /, **_: Any) -> str:
    """Return a page with its formulas as MathML, and with places in the code of its tables where a line may break."""
    text = FORMULA.sub(lambda found: convert(html.unescape(found[3]), display="inline" if found[2] == "(" else "block"), text)
    return CELL.sub(lambda cell: CODE.sub(lambda code: re.sub(r"([_./=,])", r"\1<wbr>", code[0][:-7]) + "</code>", cell[0]), text)
