import json
from pathlib import Path
from typing import Any

import pytest

from adapters.dialects import load_chat_template
from engine.errors import StartupError
from tests.adapters.dialects import templates

HI = [{"role": "user", "content": "hi"}]


def rendered(directory: Path, **kwargs: Any) -> str:
    found = load_chat_template(directory)
    assert found is not None
    return found.render(HI, **kwargs)


def configured(directory: Path, **config: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_string_in_the_config_is_the_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configured(tmp_path, chat_template=templates.CHATML)
    assert rendered(tmp_path) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert caplog.messages == []


def test_a_list_in_the_config_names_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    configured(tmp_path, chat_template=named)
    assert (rendered(tmp_path), rendered(tmp_path, tools=templates.TOOLS)) == ("a", "b")


def test_template_files_precede_the_config(tmp_path: Path) -> None:
    configured(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("ﬁle {{ bos_token }}", "utf-8")
    assert rendered(tmp_path) == "ﬁle "
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert (rendered(tmp_path), rendered(tmp_path, tools=[])) == ("ﬁle ", "tools")


def test_special_tokens_are_read_as_text_from_strings_and_objects(tmp_path: Path) -> None:
    older = {"bos_token": "<old>", "sep_token": {"content": "<sep>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    source = (
        "{{ bos_token }} {{ eos_token }} {{ sep_token }} {{ pad_token is defined }} "
        "{{ additional_special_tokens }} {{ add_bos_token is defined }}"
    )
    configured(
        tmp_path,
        chat_template=source,
        bos_token="<s>",
        eos_token={"content": "</s>", "special": True},
        pad_token=None,
        add_bos_token=True,
        additional_special_tokens=["<a>", {"content": "<b>"}],
    )
    assert rendered(tmp_path) == "<s> </s> <sep> False ['<a>', '<b>'] False"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_a_checkpoint_without_a_template_has_none(
    tmp_path: Path, config: dict[str, Any] | None
) -> None:
    if config is not None:
        configured(tmp_path, **config)
    assert load_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"chat_template": 3}', "must be a string or a list"),
        ('{"chat_template": [{"name": "default"}]}', "must be a string or a list"),
        ('{"chat_template": "{% if %}"}', "chat template 'default', line 1"),
    ],
)
def test_an_invalid_file_fails_the_start(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        load_chat_template(tmp_path)


def test_a_template_that_is_not_utf8_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"not UTF-8: .*chat_template\.jinja"):
        load_chat_template(tmp_path)


def test_a_given_template_file_precedes_all_others(tmp_path: Path) -> None:
    configured(tmp_path, chat_template="config", bos_token="<s>")
    (tmp_path / "chat_template.jinja").write_text("file")
    own = tmp_path / "own.txt"
    own.write_text("own {{ bos_token }}")
    found = load_chat_template(tmp_path, own)
    assert found is not None
    assert found.render(HI) == "own <s>"
    with pytest.raises(StartupError, match=r"cannot be read: .*missing\.jinja"):
        load_chat_template(tmp_path, tmp_path / "missing.jinja")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ bos_token }}\n{{ date.year }}", ", line 2 fails for a short message: 'date' is undef"),
        (
            "{{ raise_exception('Say\\nmore.') }}",
            ", line 1 fails for a short message: Say more. Chats",
        ),
        ("{{ messages[1].content.upper() }}", "has no element 1. Chats will be rejected"),
        (
            [{"name": "rag", "template": ""}],
            "fails for a short message: The model has no default chat",
        ),
    ],
)
def test_a_template_that_fails_for_a_short_message_is_named_at_the_start(
    tmp_path: Path, source: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    configured(tmp_path, chat_template=source)
    assert load_chat_template(tmp_path) is not None
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path}/tokenizer_config.json: the chat template")
    assert reason in warning
