from __future__ import annotations

import json

import pytest
from support.tiny_models import byte_level_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument
from block_manager_svc.text import chat
from block_manager_svc.text.chat import ChatTemplate
from block_manager_svc.text.model import TextModel

HF = byte_level_tokenizer()

CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}
"""
ALTERNATING = """{{ bos_token }}{% for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
  {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- if message.role == 'user' -%}[INST] {{ message.content | trim }} [/INST]
{%- else -%} {{ message['content'] }}{{ eos_token }}{%- endif -%}
{%- endfor %}"""
BUSY = """{%- set ns = namespace(count=0, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content -%}
        {%- continue -%}
    {%- endif -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- if ns.count > 3 -%}{%- break -%}{%- endif -%}
    {%- generation -%}{{ {'r': message.role, 'c': message.content} | tojson }}{%- endgeneration -%}
{%- endfor -%}
{{ '\n' ~ strftime_now('%Y') ~ dict(a=1) ~ (tools is none) ~ (documents is none) ~ ns.system }}
{%- macro greet(name) -%}<{{ name | upper }}>{%- endmacro -%}
{{ greet('x') }}{{ messages | map(attribute='role') | join(',') }}{{ [1, 2] | tojson(indent=2) }}
{{ "-" * 3 }}{{ 2 ** 10 }}
"""

CHATS = {
    "one user": [{"role": "user", "content": "Hi!"}],
    "system and turns": [
        {"role": "system", "content": "Be brief. <&> \"quotes\" 'single'"},
        {"role": "user", "content": "  spaces  and\nlines \n"},
        {"role": "assistant", "content": "数字 🙂"},
        {"role": "user", "content": "</s> <s>"},
    ],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": ""},
    ],
}


def text_model(template: str | None) -> TextModel:
    files = {"tokenizer.json": HF.backend_tokenizer.to_str().encode()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
        files["special_tokens.json"] = json.dumps(HF.special_tokens_map).encode()
    model = TextModel.from_files(files, len(HF))
    assert model is not None
    return model


TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "busy": BUSY, "tiny": HF.chat_template}


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_and_tokenizes_as_transformers_does(template: str, messages: list[dict[str, str]]) -> None:
    model = text_model(template)
    if template == ALTERNATING and messages[0]["role"] == "system":
        with pytest.raises(InvalidArgument, match="Conversation roles must alternate") as caught:
            model.encode_chat(messages)
        assert caught.value.reason == "CHAT_TEMPLATE_FAILED"
        return
    how = {"chat_template": template, "add_generation_prompt": True}
    assert model.render_chat(messages) == HF.apply_chat_template(messages, tokenize=False, **how)
    assert model.encode_chat(messages).tolist() == HF.apply_chat_template(messages, **how)["input_ids"]


def test_a_tokenizer_that_adds_bos_by_itself_adds_none_to_what_the_template_wrote() -> None:
    tokenizer = Tokenizer.from_str(HF.backend_tokenizer.to_str())
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "chat_template.jinja": HF.chat_template.encode(),
        "special_tokens.json": json.dumps(HF.special_tokens_map).encode(),
    }
    model = TextModel.from_files(files, len(HF))
    assert model is not None
    assert model.encode("Hi!")[0] == bos
    ids = model.encode_chat(CHATS["one user"]).tolist()
    assert ids == HF.apply_chat_template(CHATS["one user"], add_generation_prompt=True)["input_ids"]
    assert (ids[0], ids.count(bos)) == (bos, 1)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'].dumps(1) }}",
        "{{ dict.__class__.mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ '{0.__class__.__mro__[1]}'.format('') }}{{ ''.__class__() }}",
        "{% include 'secret' %}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ ('a' * 999999999) | length }}",
        "{{ 999999999 * [0] }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_what_the_sandbox_forbids_does_not_run_and_is_the_templates_failure(template: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        text_model(template).encode_chat(CHATS["one user"])
    assert caught.value.reason == "CHAT_TEMPLATE_FAILED"
    assert len(caught.value.message) < 1000


def test_the_messages_cannot_carry_template_code() -> None:
    messages = [{"role": "user", "content": "{{ 1 + 1 }}{% raise %}"}]
    assert "{{ 1 + 1 }}{% raise %}" in text_model(CHATML).render_chat(messages)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"content": "x" * 50}] * 2) == "x" * 100
    with pytest.raises(InvalidArgument, match="100 characters"):
        template.render([{"content": "x" * 50}, {"content": "x" * 51}])


def test_without_a_template_chat_is_refused_with_a_remedy() -> None:
    model = text_model(None)
    assert not model.accepts_chat
    with pytest.raises(FailedPrecondition, match="send the prompt as text or token_ids") as caught:
        model.encode_chat(CHATS["one user"])
    assert caught.value.reason == "CHAT_TEMPLATE_UNAVAILABLE"


def test_a_template_that_does_not_compile_leaves_text_usable_and_says_where() -> None:
    model = text_model("line one\n{% if %}")
    assert not model.accepts_chat
    assert len(model.encode("still works"))
    with pytest.raises(FailedPrecondition, match="line 2") as caught:
        model.encode_chat(CHATS["one user"])
    assert caught.value.reason == "CHAT_TEMPLATE_UNAVAILABLE"


def test_without_a_tokenizer_there_is_no_text_model() -> None:
    assert TextModel.from_files({"chat_template.jinja": b"x"}, 10) is None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
        ("special_tokens.json", b"["),
        ("special_tokens.json", b'{"bos_token": 1}'),
        ("special_tokens.json", b"[]"),
    ],
)
def test_unreadable_files_are_refused_by_name(name: str, data: bytes) -> None:
    good = {"tokenizer.json": HF.backend_tokenizer.to_str().encode(), "chat_template.jinja": b"x"}
    with pytest.raises(InvalidArgument, match=name) as caught:
        TextModel.from_files({**good, name: data}, len(HF))
    assert caught.value.reason == "ATTACHMENT_INVALID"
