"""A Jinja sandbox with limits: what a chat template from a stranger's file may cost us.

Owns: `compile_template`, `free_variables`, `render_template`. Runs in: front ends. Source: Jinja's sandbox forbids
dangerous attributes; the limits on time, size and depth are ours. The functions and tags that
templates expect (`raise_exception`, `strftime_now`, `tojson`, `generation`) are those of Hugging
Face transformers.

Every loop and macro body gets a call that counts and looks at the clock, everything printed is
measured (captured text included), and each operation that can make much out of little is checked
before it is done. So a template ends in an error, never in a dead process.
"""

import functools
import json
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ds4.errors import RequestError
from ds4.text.markers import GUARD

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_SECONDS: Final = 5.0
MAX_TICKS: Final = 2_000_000
MAX_VALUE_CHARS: Final = 1 << 26  # one string, and all that is printed; a request body is smaller
MAX_ITEMS: Final = 1 << 20
_ESCAPED_GUARD: Final = "\\ufdd0"
_MAX_INT_BITS: Final = 4096
_MAX_WIDTH: Final = 1024  # of padding and indentation

# The filters that templates use. Left out: those that pad, wrap or multiply their input.
_FILTERS: Final = (
    "abs count d default dictsort first groupby items last length list map max min reject rejectattr "
    "reverse round select selectattr sort unique"
)
_TEXT_FILTERS: Final = "capitalize e escape float int lower safe title trim truncate upper wordcount"
_WIDE_PERCENT: Final = re.compile(r"%[-+ #0]*(?:\d{4,}|\d*\.\d{4,}|[\d.]*\*)")
_WIDE_FIELD: Final = re.compile(r"\d{4,}|\{")  # a width that is itself a field could be anything
# What a template can do wrong by itself; anything else is our fault and must show as such.
_FAULTS: Final = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class EndlessTemplateError(RequestError):
    """A rendering used up its time or its rounds."""


class _EndlessError(SecurityError):
    """The same, on its way out of Jinja."""


class _Budget:
    """What one rendering has used. Single owner: the rendering."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.num_ticks = 0
        self.num_chars = 0


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


def _refuse(what: str) -> NoReturn:
    raise SecurityError(f"the template {what}")


def _tick() -> str:
    budget = _budget.get()
    if budget is not None:
        budget.num_ticks += 1
        if budget.num_ticks > MAX_TICKS:
            raise _EndlessError(f"the template ran more than {MAX_TICKS} loop rounds")
        if budget.num_ticks % 256 == 0 and time.monotonic() > budget.deadline:
            raise _EndlessError(f"the template ran for more than {MAX_SECONDS:g} seconds")
    return ""


def _printed(value: Any) -> Any:
    """Measures what `{{ … }}` prints, into the output or into a captured block."""
    budget = _budget.get()
    if budget is not None:
        text = _text(value)
        budget.num_chars += len(text)
        if budget.num_chars > MAX_VALUE_CHARS:
            _refuse(f"printed more than {MAX_VALUE_CHARS} characters")
        return text
    return value


def _check_size(size: int, value: Any) -> None:
    if size > (MAX_VALUE_CHARS if isinstance(value, str) else MAX_ITEMS):
        _refuse("made a value that is too large")


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _measure(value: Any) -> None:
    """Refuses a container that is small in memory but long in print, because its parts are shared."""
    num_chars = num_items = 0
    stack = [value]
    while stack:
        item = stack.pop()
        num_items += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        if num_chars > MAX_VALUE_CHARS or num_items > MAX_ITEMS or len(stack) > MAX_ITEMS:
            _refuse("prints a value that is too large")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    _measure(value)
    return str(value).replace(_ESCAPED_GUARD, GUARD)  # Python's notation escapes it


def _concatenate(*values: Any) -> str:
    texts = [_text(value) for value in values]
    _check_size(sum(map(len, texts)), "")
    return "".join(texts)


def _check_percent_format(pattern: str) -> None:
    if _WIDE_PERCENT.search(pattern):
        _refuse("formats with too great a width")


def _check_brace_format(pattern: str) -> None:
    if any(spec and _WIDE_FIELD.search(spec) for _, _, spec, _ in string.Formatter().parse(pattern)):
        _refuse("formats with too great a width")


def _checked_join(joiner: str, values: Iterable[Any]) -> list[str]:
    texts = [_text(value) for value in values]
    _check_size(sum(map(len, texts)) + len(joiner) * len(texts), "")
    return texts


def _check_replace(text: str, old: str, new: str) -> None:
    if len(new) > len(old):
        _check_size(len(text) + text.count(old) * (len(new) - len(old)), "")


@pass_environment
def _join(
    environment: Environment, values: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        values = [environment.getitem(value, attribute) for value in values]
    return d.join(_checked_join(d, values))


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = _text(value)
    _check_replace(text, old, new)
    return text.replace(old, new, count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(width, _MAX_WIDTH)
    text = _text(value)
    lines = text.split("\n")
    _check_size(len(text) + len(lines) * len(prefix), "")
    indented = [
        line if (index == 0 and not first) or (not line and not blank) else prefix + line
        for index, line in enumerate(lines)
    ]
    return "\n".join(indented)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes text of its input, with the input measured first."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Mapping | list | tuple):
                _measure(value)
        return function(*args, **kwargs)

    return wrapper


def _json_default(value: Any) -> Any:
    """Jinja's `map` and `select` give generators, which JSON does not know."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with Python's spacing: models were trained on it. No HTML escapes."""
    if indent is not None and indent > 16:
        _refuse("indents JSON too far")
    _measure(value)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_json_default,
    )
    return text.replace(_ESCAPED_GUARD, GUARD) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    _check_percent_format(pattern)
    return datetime.now(UTC).strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` marks the trained part of a conversation; for serving it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses the operations that make much out of little. Shared by all renderings; holds no state."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    tick = staticmethod(_tick)
    concatenate = staticmethod(_concatenate)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, unless the result would be too large."""
        if operator == "+":
            if _is_sized(left) and _is_sized(right):
                _check_size(len(left) + len(right), left)
        elif operator == "%":
            if isinstance(left, str):
                _check_percent_format(left)
                _measure(right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                _refuse("computes a number that is too large")
        else:
            for value, times in ((left, right), (right, left)):
                if _is_sized(value) and isinstance(times, int):
                    _check_size(len(value) * times, value)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in Jinja; but lists may change, since every rendering has its own copy of the request."""
        return (isinstance(obj, list) and attr in ("append", "insert", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, sandboxed by Jinja, with a limit on widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_brace_format(value.__self__)
        return wrapped

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call a template makes."""
        _tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name == "join" and args:
                args = (_checked_join(owner, args[0]),)
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif any(isinstance(value, int) and value > _MAX_WIDTH for value in args) and name in (
                "center",
                "expandtabs",
                "ljust",
                "rjust",
                "zfill",
            ):
                _refuse("pads too far")
            elif name in ("expandtabs", "translate"):
                _check_size(len(owner) * 8, owner)
        return super().call(context, function, *args, **kwargs)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationTag],
        finalize=_printed,
    )
    kept = {name: environment.filters[name] for name in _FILTERS.split()}
    text = {name: _measured(environment.filters[name]) for name in _TEXT_FILTERS.split()}
    environment.filters.clear()
    environment.filters.update(
        kept, **text, string=_text, join=_join, replace=_replace, indent=_indent, tojson=_tojson
    )
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _instrument(tree: nodes.Template) -> nodes.Template:
    """Adds the counting call to every body that can run often, and checks to `~`."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _checked_concat(value))
            elif isinstance(value, list):
                value[:] = [
                    _checked_concat(item) if isinstance(item, nodes.Concat) else item for item in value
                ]
    bodies = [loop.body for loop in tree.find_all(nodes.For)]
    bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
    for body in bodies:
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        body.insert(0, nodes.ExprStmt(tick))
    return tree


def _checked_concat(concat: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("concatenate"), concat.nodes, [], None, None)


def compile_template(source: str) -> Template:
    """A template ready to render. Raises ValueError saying what is wrong with `source`."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
    environment: Environment = _environment()
    try:
        return environment.from_string(_instrument(environment.parse(source)))
    except TemplateError as error:
        raise ValueError(f"{error} (line {getattr(error, 'lineno', '?')})") from None
    except (RecursionError, SyntaxError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def free_variables(source: str) -> frozenset[str]:
    """The variables that a template, which compiles, reads and does not set itself."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def render_template(template: Template, variables: Mapping[str, Any]) -> str:
    """The rendered text. Raises RequestError with the template's own message where it refuses, and its
    EndlessTemplateError where it does not come to an end.
    """
    token = _budget.set(_Budget())
    try:
        return template.render(variables)
    except RecursionError:
        raise RequestError("the chat template calls itself too deeply", param="messages") from None
    except _FAULTS as error:
        message = str(error) or type(error).__name__
        kind = EndlessTemplateError if isinstance(error, _EndlessError) else RequestError
        raise kind(f"the chat template refused the request: {message}", param="messages") from error
    finally:
        _budget.reset(token)
