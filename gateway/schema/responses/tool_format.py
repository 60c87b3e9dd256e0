r"""The `format` of a custom tool as a regular expression that its input must match.

A custom tool's input is a JSON string in the arguments of its function. JSON schemas constrain a
string by a regular expression, so a Lark grammar is rewritten as one: each rule is replaced by its
definition. That is possible for every grammar without recursion.

    start: "*** Begin" LF line+        \*\*\*\ Begin(?:\n)(?:(?:\+)(?:(?:.*))(?:\n))+
    line: "+" /(.*)/ LF
    %import common.LF
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, invalid

MAX_PATTERN = 64 << 10  # characters; definitions that use others twice grow exponentially
_COMMON = {  # terminals of Lark's library `common`
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+", "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|[ \t\f\r]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
      | (?P<number>\d+)
      | (?P<name>_?[A-Za-z][A-Za-z0-9_]*)
      | (?P<op>\.\.|->|[:|()\[\]?*+~.,%!])
      | (?P<newline>\n)""",
    re.VERBOSE,
)
_FLAGS = frozenset("imsux")


class _Token(NamedTuple):
    kind: str
    text: str


_END = _Token("end", "the end of a definition")


def input_pattern(form: Mapping[str, Any] | None) -> str | None:
    """The expression that the whole input must match; None if any text is allowed.

    Raises `InvalidRequest` that names a field of `format`, for a form that cannot be constrained
    too, so that no grammar is ignored.
    """
    if form is None:
        return None
    check_allowed(str(form.get("type")), "format.type", ("text", "grammar"))
    if form["type"] == "text":
        return None
    check_allowed(str(form.get("syntax")), "format.syntax", ("lark", "regex"))
    definition = form.get("definition")
    if not isinstance(definition, str):
        raise InvalidRequest("Missing required parameter: 'format.definition'.", _FIELD)
    if form["syntax"] == "regex":
        pattern = definition.removeprefix("^")
        return pattern.removesuffix("$") if not pattern.endswith(r"\$") else pattern
    return _Grammar.read(definition).pattern("start", ())


_FIELD = "format.definition"


def _error(reason: str) -> InvalidRequest:
    return invalid(_FIELD, f"{reason}.")


@dataclass(slots=True)
class _Grammar:
    """The definitions by name, and the expressions of those that were needed so far."""

    definitions: dict[str, list[_Token]] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "_Grammar":
        grammar = cls()
        for statement in _statements(text):
            if statement[0].text == "%":
                grammar._directive([token.text for token in statement[1:]])
                continue
            while statement[0].text in ("?", "!"):  # how Lark shapes its tree
                statement = statement[1:]
            name, *rest = statement
            if rest and rest[0].text == ".":  # the priority of a terminal
                rest = rest[2:]
            if name.kind != "name" or not rest or rest[0].text != ":":
                raise _error(f"expected 'name: definition' at {name.text!r}")
            grammar.definitions[name.text] = rest[1:]
        return grammar

    def _directive(self, words: list[str]) -> None:
        match words:
            case ["import", "common", ".", name] if name in _COMMON:
                self.patterns[name] = _group(_COMMON[name])
            case ["import", "common", ".", name, "->", alias] if name in _COMMON:
                self.patterns[alias] = _group(_COMMON[name])
            case ["import", "common", "(", *names, ")"] if {*names} - {","} <= _COMMON.keys():
                self.patterns |= {name: _group(_COMMON[name]) for name in names if name != ","}
            case _:
                shown = "".join(words[:1]) + " " + "".join(words[1:5])
                raise _error(f"'%{shown.strip()}' is not supported in grammars of custom tools")

    def pattern(self, name: str, used_by: tuple[str, ...]) -> str:
        """The expression of a rule or terminal, which the rules `used_by` use."""
        if name in used_by:
            raise _error(
                f"rule {name!r} uses itself; grammars of custom tools must not be recursive"
            )
        if name not in self.patterns:
            if name not in self.definitions:
                raise _error(f"{name!r} is not defined")
            parser = _Expansion(self.definitions[name], self, (*used_by, name))
            found = parser.whole()
            if len(found) > MAX_PATTERN:
                raise _error(f"without rules it has more than {MAX_PATTERN} characters")
            self.patterns[name] = _group(found)
        return self.patterns[name]


class _Expansion:
    """The parser of one definition."""

    def __init__(self, tokens: list[_Token], grammar: _Grammar, used_by: tuple[str, ...]) -> None:
        self._tokens = tokens
        self._at = 0
        self._grammar = grammar
        self._used_by = used_by

    def whole(self) -> str:
        found = self._alternatives()
        if self._next is not _END:
            raise _error(f"unexpected {self._next.text!r}")
        return found

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _takes(self, *texts: str) -> str:
        """The next operator, if it is one of these, else ""."""
        is_one = self._next.kind == "op" and self._next.text in texts
        return self._take().text if is_one else ""

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())
        return "|".join(found)

    def _sequence(self) -> str:
        parts = []
        while self._next is not _END and self._next.text not in ("|", ")", "]", "->"):
            parts.append(self._item())
        if self._takes("->"):
            self._take()  # the alias of the alternative
        return "".join(parts)

    def _item(self) -> str:
        found = self._atom()
        if operator := self._takes("?", "*", "+"):
            return found + operator
        if not self._takes("~"):
            return found
        low = high = self._number()
        if self._takes(".."):
            high = self._number()
        return f"{found}{{{low},{high}}}"

    def _number(self) -> str:
        token = self._take()
        if token.kind != "number":
            raise _error(f"expected a number at {token.text!r}")
        return token.text

    def _atom(self) -> str:
        token = self._take()
        match token:
            case ("string", text) if self._takes(".."):
                return f"[{re.escape(_text(text))}-{re.escape(_text(self._take().text))}]"
            case ("string", text):
                return _group(re.escape(_text(text)), "i" if text.endswith("i") else "")
            case ("regex", text):
                body, _, flags = text[1:].rpartition("/")
                if not {*flags} <= _FLAGS:
                    raise _error(f"unknown flags {flags!r} of a regular expression")
                return _group(body.replace(r"\/", "/"), flags)
            case ("name", name):
                return self._grammar.pattern(name, self._used_by)
            case ("op", "(" | "[" as opening):
                inside = self._alternatives()
                if not self._takes(")" if opening == "(" else "]"):
                    raise _error(f"{opening!r} is not closed")
                return _group(inside) + ("" if opening == "(" else "?")
        raise _error(f"unexpected {token.text!r}")


def _group(pattern: str, flags: str = "") -> str:
    return f"(?{flags}:{pattern})"


def _text(literal: str) -> str:
    """The characters of a string literal."""
    try:
        return str(ast.literal_eval(literal.removesuffix("i")))
    except (ValueError, SyntaxError):
        raise _error(f"{literal[:50]} is not a string") from None


def _statements(text: str) -> Iterator[list[_Token]]:
    """The tokens of each directive and definition, which may have several lines."""
    statement: list[_Token] = []
    tokens = [*_tokens(text), _Token("newline", "\n")]
    depth, is_new_line = 0, False
    for token in tokens:
        if token.kind == "newline":
            is_new_line = True
            continue
        if is_new_line and not depth and token.text != "|" and statement:
            yield statement
            statement = []
        is_new_line = False
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        statement.append(token)
    if statement:
        yield statement


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _error(f"unexpected {text[at : at + 20]!r}")
        at = found.end()
        kind = str(found.lastgroup)
        if kind != "skip":
            yield _Token(kind, found.group())
