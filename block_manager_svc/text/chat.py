"""Chat templates: a model's own Jinja template, rendered in the sandbox.

The environment is the one that templates are written for, that of transformers'
`apply_chat_template` (transformers/utils/chat_template_utils.py): the same block trimming,
extensions, filters and globals, so that the same messages give the same prompt.
A template is foreign code: it runs in Jinja's immutable sandbox, sees plain strings only,
and neither its output nor a repeated value may grow without bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from block_manager_svc.core.errors import InvalidArgument

MAX_RENDERED_CHARS = 16 << 20
_MAX_POWER_BITS = 4096
_MAX_WORDS = 500  # characters of a template's own words in an error


class TemplateBroken(ValueError):
    """The template does not compile; the message has the parser's words."""


class ChatTemplate:
    """One compiled template.

    source:         Jinja, as in a model's chat_template.jinja.
    special_tokens: names a template may use, such as bos_token, to their text.
    Raises TemplateBroken.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateBroken(f"line {getattr(error, 'lineno', '?')}: {_words(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of these messages, with the opening of the assistant's turn at its end.

        Raises InvalidArgument CHAT_TEMPLATE_FAILED, with the template's own words.
        """
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise OverflowError(f"the prompt grew past {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # whatever foreign code raises is the template's failure
            raise InvalidArgument(
                "CHAT_TEMPLATE_FAILED",
                f"the model's chat template refused these messages: {_words(error)}",
                messages=len(messages),
            ) from error
        return "".join(pieces)


def _words(error: Exception) -> str:
    words = str(error) or type(error).__name__
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "…"


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox; `*` and `**`, which make much out of little, are bounded besides."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    if len(value) * times > MAX_RENDERED_CHARS:
                        raise OverflowError(f"a value repeated to {len(value) * times} items")
                    break
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise OverflowError(f"a power of more than {_MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks, for training, what the assistant wrote; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates: makes dictionaries, gives no way to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may pass a name `self`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace's attribute may not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
