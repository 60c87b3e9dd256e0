from datetime import UTC, datetime
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from adapters.dialects.jinja_template import JinjaTemplate
from engine.errors import InvalidRequest, StartupError
from tests.adapters.dialects import templates

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime(2024, 7, 26, 23, 59, tzinfo=UTC)


def template(source: str) -> JinjaTemplate:
    return JinjaTemplate({"default": source}, SPECIALS, lambda: NOW)


def reference(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **SPECIALS
    )
    text = library.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, templates.TOOLS])
@pytest.mark.parametrize("conversation", templates.CONVERSATIONS)
@pytest.mark.parametrize("name", templates.ALL)
def test_prompts_equal_those_of_transformers(
    name: str, conversation: str, tools: list[dict[str, Any]] | None, generation: bool
) -> None:
    messages = templates.CONVERSATIONS[conversation]
    kwargs: dict[str, Any] = {"tools": tools, "date_string": "1 Jan"}
    ours = template(templates.ALL[name]).render(
        messages, add_generation_prompt=generation, **kwargs
    )
    assert ours == reference(
        templates.ALL[name], messages, add_generation_prompt=generation, **kwargs
    )


def test_tool_calls_and_tool_results_equal_those_of_transformers() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": {"degrees": 20}},
    ]
    ours = template(templates.DATED).render(messages, tools=templates.TOOLS, date_string="x")
    kwargs = {"tools": templates.TOOLS, "date_string": "x", "add_generation_prompt": True}
    assert ours == reference(templates.DATED, messages, **kwargs)
    assert '"parameters": {"city": "Köln"}}' in ours


def test_the_date_is_the_current_date() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "Today is 26 Jul 2024." in template(templates.DATED).render(messages)
    today = JinjaTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render(messages)
    assert 2024 <= int(today) < 2200


def test_an_exception_of_a_template_becomes_an_invalid_request() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template(templates.STRICT).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.strip() }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ '%d' % 'a' }}",
        "{{ messages | tojson | length | first }}",
        "{{ range(10 ** 6) | list }}",
        "{{ raise_exception('') }}",
        "{{ strftime_now(1) }}",
    ],
)
def test_a_template_that_fails_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\w") as caught:
        template(source).render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ dict.update(messages[0], {'content': 'x'}) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n.__class__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_read_outside_or_modify_the_messages(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        template(source).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BEYOND_LIMITS = [
    LOOPS,
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s.replace('a', 'aaaaaaaa') %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s, n.s] | join(n.s) %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s.join([n.s, n.s, n.s]) %}{% endfor %}",
    "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 10, true) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000d}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "{{ [1] | tojson(indent=10 ** 10) }}",
    "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "{{ lipsum(10 ** 10) }}",
]


@pytest.mark.parametrize("source", BEYOND_LIMITS)
def test_a_template_beyond_its_limits_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest):
        template(source).render([{"role": "user", "content": "hi"}])


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": "word " * 200} for n in range(4001)
    ]
    for source in templates.ALL.values():
        assert len(template(source).render(messages)) > 4_000_000


def test_developer_becomes_system_in_templates_that_do_not_mention_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template(templates.CHATML).render(messages).startswith("<|im_start|>system\nBe brief.")
    knowing = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert template(knowing).render(messages) == "yes"


def test_tools_select_the_template_for_tools() -> None:
    named = JinjaTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert named.render([]) == "plain"
    assert named.render([], tools=templates.TOOLS) == "with tools"
    with pytest.raises(InvalidRequest, match="no default chat template, only rag"):
        JinjaTemplate({"rag": ""}, {}).render([])


def test_a_template_that_does_not_compile_fails_the_start() -> None:
    with pytest.raises(StartupError, match="line 2"):
        template("\n{% for x in %}")
