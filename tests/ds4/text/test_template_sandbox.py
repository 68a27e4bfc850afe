"""A chat template may compute, but not for ever, not without end, and not outside its sandbox."""

from typing import Any

import pytest

from ds4.errors import RequestError
from ds4.text import template_sandbox
from ds4.text.markers import GUARD
from ds4.text.template_sandbox import compile_template, render_template


def render(source: str, **variables: Any) -> str:
    return render_template(compile_template(source), variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", "ab2c"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ {'b': 1, 'a': '<é>'} | tojson }}", '{"b": 1, "a": "<é>"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ ['a', 'b'] | map('upper') | tojson }}", '["A", "B"]'),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{{ ['x', 2] | join(', ') }}{{ [{'n': 'y'}] | join(attribute='n') }}", "x, 2y"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ 'aXbX' | replace('X', '--') }}{{ 'aa'.replace('a', 'b', 1) }}", "a--b--ba"),
        ("{{ '%s-%02d' % ('a', 7) }}{{ '{}:{:>3}'.format('b', 'c') }}", "a-07b:  c"),
        ("{% set l = [] %}{{ l.append('x') or l[0] }}", "x"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m('q') }}{% set c %}k{{ 1 }}{% endset %}{{ c }}", "<q>k1"),
        ("{% set ns = namespace(n=0) %}{% for x in range(3) %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ ' a '.strip() + 'b'.upper() + 'c,d'.split(',')[1] }}{{ ', '.join(['x', 'y']) }}", "aBdx, y"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for k, v in {'b': 2} | items %}{{ k }}{{ v }}{% endfor %}", "b2"),
        ("{{ '{0.__class__}'.format('') }}", ""),
    ],
)  # fmt: skip
def test_what_templates_use_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_guard_survives_the_notations_that_escape_it() -> None:
    assert render("{{ x }}{{ x | string }}{{ '' ~ x }}", x=[GUARD]) == f"['{GUARD}']" * 3
    assert render("{{ x | tojson(ensure_ascii=true) }}", x=f"<{GUARD}s>") == f'"<{GUARD}s>"'


def test_the_templates_own_message_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{{ none + 1 }}",
        "{{ [1][5].x }}",
        "{{ {}['a'].b }}",
        "{% include 'other' %}",
        "{{ 'x' | int(base=99) + 'y' }}",
        "{{ range(10 ** 9) }}",
        "{{ 'é' | tojson(indent=99) }}",
        "{{ missing | tojson }}",
    ],
)
def test_a_template_that_fails_is_a_client_error_and_not_a_crash(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].x }}",
        "{{ {}.update({'a': 1}) }}",
        "{{ [3, 1].sort() }}",
    ],
)
def test_the_sandbox_has_no_way_out(source: str) -> None:
    with pytest.raises(RequestError):
        render(source, messages=["m"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [0] * 10 ** 8 }}",
        "{{ 9 ** 99999 }}",
        "{{ 2 ** 4000 * 2 ** 4000 }}",
        "{{ '%99999d' % 1 }}",
        "{{ '%*d' % (99999, 1) }}",
        "{{ '{:99999}'.format('a') }}",
        "{{ '{:{}}'.format('a', 99999) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ '7'.zfill(10 ** 9) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | string }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    ],
)  # fmt: skip
def test_little_cannot_be_made_into_too_much(source: str) -> None:
    with pytest.raises(RequestError, match=r"the template|range"):
        render(source)


def test_loops_without_end_are_stopped_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TICKS", 5000)
    source = "{% set r = range(1000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="5000 loop rounds"):
        render(source)


def test_loops_without_end_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(RequestError, match="seconds"):
        render("{% for a in range(1000) %}{% endfor %}")


def test_a_macro_that_calls_itself_is_stopped() -> None:
    with pytest.raises(RequestError, match="too deeply"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_output_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_VALUE_CHARS", 1000)
    with pytest.raises(RequestError, match="printed more than 1000"):
        render("{% for a in range(1000) %}xx{{ a }}{% endfor %}")


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' | no_such_filter }}", "{% unknown %}", "{{" + "(" * 5000]
)
def test_a_broken_source_is_said_at_load(source: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        compile_template(source)


def test_a_source_of_absurd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        compile_template("x" * (template_sandbox.MAX_SOURCE_CHARS + 1))
