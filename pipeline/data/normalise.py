"""Text to text, before anything looks at it."""

import re
import unicodedata

from pipeline.data.recipe import Normalise

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]"
)  # not \t \n \r, nor U+0085, a line end
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+\b")
_IPV4 = re.compile(
    r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
)


def normalise(text: str, rules: Normalise) -> str:
    """Apply the rules in a fixed order; with none of them on, the very same text."""
    if rules.unicode != "none" and not text.isascii():
        text = unicodedata.normalize(rules.unicode, text)
    if rules.newlines and "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if rules.controls:
        text = _CONTROLS.sub("", text)
    if rules.pii:
        text = _EMAIL.sub("name@example.com", text)
        text = _IPV4.sub("192.0.2.1", text)
    return text
