"""What a PromQL expression asks for: its metrics, their labels and label values, and its functions."""

import re
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"(?P<space>\s+)|(?P<text>\"[^\"]*\")|(?P<range>\[[^\]]*\])|(?P<variable>\$\w+)"
    r"|(?P<number>[0-9.]+(?:[smhdwy]\b)?)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>=~|!~|!=|<=|>=|==|[-+*/%^<>=(){},])"
)
FUNCTIONS: Final = frozenset({"rate", "increase", "sum", "min", "max", "histogram_quantile", "label_values"})
_OPERATORS: Final = frozenset({"and", "or", "unless", "offset", "bool"})
_GROUPINGS: Final = frozenset({"by", "without", "on", "ignoring"})


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric, and the text that each of its labels is matched with."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression names."""

    selectors: tuple[Selector, ...]
    grouped_by: frozenset[str]
    """Labels of its aggregations, and those that its sides are matched on."""


def read(text: str) -> Expression:
    """Read an expression; `ValueError` for a sign that is none, or a function that is not in `FUNCTIONS`."""
    words = [each for each in tokens(text) if not each.startswith("[")]
    selectors: list[Selector] = []
    grouped: set[str] = set()
    at = 0
    while at < len(words):
        token, following = words[at], words[at + 1] if at + 1 < len(words) else ""
        at += 1
        if token in _GROUPINGS:
            end = words.index(")", at)
            grouped.update(each for each in words[at + 1 : end] if each != ",")
            at = end + 1
        elif token == "label_values":  # noqa: S105 - Grafana's: a metric and a label
            grouped.add(words[words.index(")", at) - 1])
            selectors.append(Selector(words[at + 1], ()))
            at = words.index(")", at) + 1
        elif not re.match(r"[a-zA-Z_]", token) or token in _OPERATORS:
            continue
        elif following == "(" or following in _GROUPINGS:
            if token not in FUNCTIONS:
                raise ValueError(f"a function must be one of {', '.join(sorted(FUNCTIONS))}, got {token}")
        elif following == "{":
            end = words.index("}", at)
            selectors.append(Selector(token, tuple(_matchers(words[at + 1 : end]))))
            at = end + 1
        else:
            selectors.append(Selector(token, ()))
    return Expression(tuple(selectors), frozenset(grouped))


def tokens(text: str) -> list[str]:
    """The words and signs of an expression, without spaces; a range such as `[15m]` is one."""
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 20]!r} is no PromQL")
        if match.lastgroup != "space":
            found.append(match.group())
        at = match.end()
    return found


def _matchers(tokens: list[str]) -> list[tuple[str, str]]:
    """Of the tokens between braces: `label`, a sign, a text, and commas."""
    return [(tokens[at], tokens[at + 2].strip('"')) for at in range(0, len(tokens), 4)]
