import asyncio
from typing import Any

import pytest

from adapters.dialects.jinja_template import JinjaTemplate
from adapters.dialects.template_process import TemplateJob, TemplateProcesses
from engine.errors import InvalidRequest

HI = [{"role": "user", "content": "hi"}]
# Few steps of the sandbox, but much work inside built-in functions.
SLOW = "{% for i in range(9000) %}{% set x = range(99999) | sum %}{% endfor %}"


async def rendered(source: str, variables: dict[str, Any] | None = None) -> str:
    template = JinjaTemplate({"default": "x"}, {"bos_token": "<s>"})
    return await template.render_source(source, HI, variables or {})


async def test_messages_variables_and_special_tokens_reach_the_template() -> None:
    prompt = "{% if add_generation_prompt %}>{% endif %}"
    source = "{{ bos_token }}{{ messages[0].content }}{{ mine }}" + prompt
    assert await rendered(source, {"mine": "é\ud83d"}) == "<s>hié\ud83d>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No.') }}", "^No\\.$"),
        ("{{", "Invalid 'chat_template'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 'x' * 999999999 }}", "limit of generated text"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
            "limit",
        ),
    ],
)
async def test_errors_of_the_template_are_raised(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await rendered(source)


async def test_a_template_that_takes_too_long_is_killed() -> None:
    processes = TemplateProcesses(wall_seconds=1.0)
    job = TemplateJob(SLOW, {}, HI, {}, add_generation_prompt=True)
    with pytest.raises(InvalidRequest, match="limit of 1 s") as caught:
        await processes.render(job)
    assert caught.value.param == "chat_template"


async def test_a_template_that_takes_too_much_memory_fails_alone() -> None:
    lists = "{% for i in range(330) %}{% set ns.x = ns.x + [range(99999) | list] %}{% endfor %}"
    source = "{% set ns = namespace(x=[]) %}" + lists
    job = TemplateJob(source, {}, HI, {}, add_generation_prompt=True)
    with pytest.raises(InvalidRequest, match="1024 MiB") as caught:
        await TemplateProcesses(wall_seconds=60).render(job)
    assert caught.value.param == "chat_template"


async def test_a_cancelled_rendering_kills_its_process() -> None:
    processes = TemplateProcesses()
    job = TemplateJob(SLOW, {}, HI, {}, add_generation_prompt=True)
    rendering = asyncio.create_task(processes.render(job))
    await asyncio.sleep(0.2)
    rendering.cancel()
    await asyncio.wait((rendering,))
    assert rendering.cancelled()
    quick = TemplateJob("x", {}, HI, {}, add_generation_prompt=True)
    assert await processes.render(quick) == "x"
