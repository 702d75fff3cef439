"""Templates run in a sandbox with fuel; what goes wrong names the template and the line."""

from __future__ import annotations

import pytest

from palaver.errors import TemplateError
from palaver.formats.template import Template


def test_loops_know_where_they_are() -> None:
    source = "{% for x in items %}{{ loop.index }}/{{ loop.length }}{{ ', ' if not loop.last }}{% endfor %}"
    assert Template(source).render({"items": "abc"}) == "1/3, 2/3, 3/3"


def test_loop_controls_generation_blocks_and_json() -> None:
    source = "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    assert Template(source).render({}) == "1"
    assert Template("{% generation %}{{ x | tojson }}{% endgeneration %}").render({"x": {"é": "<"}}) == '{"é": "<"}'
    assert Template("{{ x | tojson(ensure_ascii=True) }}").render({"x": "é"}) == '"\\u00e9"'


def test_lists_of_the_template_may_grow() -> None:
    assert Template("{% set l = [] %}{% set _ = l.append(1) %}{{ l | length }}").render({}) == "1"


def test_the_time_is_the_one_that_was_given() -> None:
    from datetime import datetime

    assert Template("{{ strftime_now('%d %b %Y') }}").render({}, datetime(2030, 5, 1)) == "01 May 2030"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested"),
        ("{{ 'x' * 10**12 }}", "repeats"),
        ("{{ 10 ** 10000 }}", "power"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "characters",
        ),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "characters",
        ),
        ("{{ 'x'.ljust(10**9) }}", "number"),
        ("{{ 'x' | center(10**9) }}", "number"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '{:>1000000000}'.format(1) }}", "width"),
        ("{{ range(10**9) }}", "number"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% if %}", "line 1"),
        ("{% if a %}" * 10_000, "nested"),
        ("{{ " + "(" * 10_000, "nested"),
        ("x" * 2_000_000, "longer"),
    ],
)
def test_what_an_honest_template_never_does_is_refused(source: str, why: str) -> None:
    with pytest.raises(TemplateError) as error:
        Template(source, "probe.jinja").render({"messages": []})
    assert why in str(error.value)
    assert "probe.jinja" in str(error.value)


def test_the_line_of_a_failure_is_named() -> None:
    with pytest.raises(TemplateError, match="line 3"):
        Template("a\nb\n{{ raise_exception('no') }}\n", "probe").render({})


def test_generators_are_written_as_json_lists() -> None:
    source = "{{ items | map(attribute='n') | tojson }} "
    source += "{{ {'k': items | map(attribute='n') | select('odd')} | tojson }}"
    assert Template(source).render({"items": [{"n": 1}, {"n": 2}, {"n": 3}]}) == '[1, 2, 3] {"k": [1, 3]}'
    with pytest.raises(TemplateError, match="JSON"):
        Template("{{ x | tojson }}").render({"x": object()})
