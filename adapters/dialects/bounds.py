"""A Jinja sandbox with limits on the steps and characters of a rendering.

Every loop iteration and every call costs one step; every created string or list costs its length.
The sandbox has no hooks for loops and `~`, so the parsed template is rewritten to pass them
through internal filters. Where an argument determines the size of a result, the size is checked
before the result is created.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

BUDGET = "\0budget"  # a name that is not a valid identifier in a template
_LOOP, _JOIN = "\0loop", "\0join"
_MAX_BITS = 10_000
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{5})")  # printf widths
_WIDE_FIELD = re.compile(r":[^}]*(?:\{|\d{5})")  # str.format widths
_WIDTH_FUNCTIONS = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice"}
_WIDTH_FUNCTIONS |= {"tojson", "wordwrap"}


class RenderBudget:
    """The steps and characters that are left for one rendering."""

    __slots__ = ("chars", "steps")

    def __init__(self, steps: int, chars: int) -> None:
        self.steps = steps
        self.chars = chars

    def count(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateRuntimeError(
                "the template exceeds the limit of loop iterations and calls"
            )

    def add_chars(self, size: int) -> None:
        self.chars -= size
        if self.chars < 0:
            raise TemplateRuntimeError("the template exceeds the limit of generated text")

    def add_value(self, made: object) -> None:
        if isinstance(made, (str, list, tuple, dict)):
            self.add_chars(len(made))


class GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; it is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that Jinja requires

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. `render` requires a `RenderBudget` in the variable named `BUDGET`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_emit,
        )
        del self.globals["lipsum"]

    def compile_bounded(self, source: str) -> Template:
        """Compile `source`. The filters that are registered now are metered from here on."""
        self.filters = {name: _metered(name, fn) for name, fn in self.filters.items()}
        self.filters |= {_LOOP: _loop, _JOIN: _join}
        tree = _MeteringTransformer().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget(context).add_chars(_size_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.count()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = _charge_arguments(budget, obj.__name__, (owner, *args))[1:]
        made = super().call(context, obj, *args, **kwargs)
        budget.add_value(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise SecurityError("a format field is too wide; at most 4 digits are allowed")
        return wrapped


class _MeteringTransformer(NodeTransformer):
    """Passes the iterables of loops and the operands of `~` through internal filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOP, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOIN, [], [], None, None, lineno=node.lineno)


def _budget(context: Context) -> RenderBudget:
    budget = context.parent[BUDGET]
    assert isinstance(budget, RenderBudget), "a template was rendered without a budget"
    return budget


@pass_context
def _emit(context: Context, value: object) -> str:
    text = str(value)
    _budget(context).add_chars(len(text))
    return text


@pass_context
def _loop(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    budget = _budget(context)
    if isinstance(items, (str, list, tuple, dict, range)):
        budget.count(len(items))
        return items
    return _counted(budget, items)


def _counted(budget: RenderBudget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.count()
        yield item


@pass_context
def _join(context: Context, parts: list[object]) -> str:
    texts = [str(part) for part in parts]
    _budget(context).add_chars(sum(map(len, texts)))
    return "".join(texts)


def _metered(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    kind = getattr(getattr(fn, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.count()
        _charge_arguments(budget, name, (*args, *kwargs.values()))
        made = fn(*_first_argument(kind, context), *args, **kwargs)
        budget.add_value(made)
        return made

    return run


def _first_argument(kind: str | None, context: Context) -> tuple[Context | Environment | Any, ...]:
    match kind:
        case "context":
            return (context,)
        case "eval_context":
            return (context.eval_ctx,)
        case "environment":
            return (context.environment,)
    return ()


def _charge_arguments(budget: RenderBudget, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Charge the budget for the result of a string method or filter before it is computed.

    Returns `args`, whose first element is the subject; an iterator to join becomes a list.
    """
    subject = args[0] if args else ""
    if name == "replace" and len(args) > 2:
        old, new = str(args[1]), str(args[2])
        budget.add_chars(str(subject).count(old) * len(new))
    elif name == "join" and isinstance(subject, str) and len(args) == 2:  # ",".join(items)
        args = (subject, list(args[1]))
        budget.add_chars(len(subject) * len(args[1]) + sum(len(str(item)) for item in args[1]))
    elif name == "join" and isinstance(subject, (list, tuple)):  # items | join(",")
        glue = str(args[1]) if len(args) > 1 else ""
        budget.add_chars(len(glue) * len(subject) + sum(len(str(item)) for item in subject))
    elif name == "format" and _WIDE.search(str(subject)):
        raise SecurityError("a format field is too wide; at most 4 digits are allowed")
    elif name in _WIDTH_FUNCTIONS:
        size = len(subject) if isinstance(subject, (str, list, tuple)) else 1
        widths = [abs(arg) for arg in args[1:] if isinstance(arg, int)]
        budget.add_chars((size + 1) * max(widths, default=1))
    return args


def _size_of_binop(operator: str, left: Any, right: Any) -> int:
    """Characters or items of the result. Raises `SecurityError` for numbers that are too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * abs(right)
        if bits > _MAX_BITS:
            raise SecurityError(f"a number has more than {_MAX_BITS} bits")
        return 0
    sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
    if operator == "*" and sizes:
        counts = [side for side in (left, right) if isinstance(side, int)]
        return sizes[0] * max(counts, default=0)
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        raise SecurityError("a format field is too wide; at most 4 digits are allowed")
    return sum(sizes)
