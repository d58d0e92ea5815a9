"""Tokenizer files of any quality, and chat templates that are not trusted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import oled_moe
from oled_moe.errors import CheckpointError, InputError
from oled_moe.tokenization import Tokenizer
from oled_moe.tool_calls import ToolCallParser, check_tool_template

DEMO = Path(oled_moe.__file__).parent / "demo"
# The LLaDA2 template as models.md 10 describes it, without tools.
LLADA2 = """\
{%- set first = messages[0]['content'] + '\\n' if messages[0]['role'] == 'system' else '' -%}
<role>SYSTEM</role>{{ first }}detailed thinking off<|role_end|>
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<role>HUMAN</role>{{ message['content'] }}<|role_end|>
{%- elif message['role'] == 'assistant' -%}
<role>ASSISTANT</role>{{ message['content'] }}<|role_end|>
{%- elif message['role'] == 'system' and not loop.first -%}
<role>SYSTEM</role>{{ message['content'] }}<|role_end|>
{%- elif message['role'] not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('unknown role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<role>ASSISTANT</role>{%- endif -%}"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    return tmp_path


def load(directory: Path, settings: Any = None, template: str | None = None) -> Tokenizer:
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# The ChatML template of Qwen3 as it is published to behave, which SDAR's checkpoints carry: turns
# between <|im_start|> and <|im_end|>, tools in the system turn, calls and results as tags, past
# reasoning left out, and an empty one where thinking is switched off.
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\n\n' }}
{%- endif %}
{{- '# Tools\n\nSignatures between <tools></tools> tags:\n<tools>' }}
{%- for tool in tools %}
{{- '\n' + (tool | tojson) }}
{%- endfor %}
{{- '\n</tools>\n\nAnswer with <tool_call></tool_call> tags.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' + content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function else call %}
{%- if not loop.first or content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- set is_first = loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' if is_first else '' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- set is_last = loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\n' if is_last else '' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}"""


# --- tokens


def test_a_long_text_has_the_tokens_of_a_short_one(directory: Path) -> None:
    tokenizer = load(directory)
    piece = "What is 12 + 30, <|role_end|> or \u00e9?\n"
    assert tokenizer.encode(piece * 500) == tokenizer.encode(piece) * 500
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a" * 10000 + "\ud800")


def test_no_token_is_longer_than_the_longest(directory: Path) -> None:
    tokenizer = load(directory)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(640)]
    # Parts of characters are read as a sign of three bytes.
    whole = [text for text in texts if "\ufffd" not in text]
    assert tokenizer.longest_token_bytes == max(len(text.encode()) for text in whole) == 15


# --- files


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": {"type": "BPE"}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    ],
    ids=lambda content: repr(content)[:20],
)
def test_broken_tokenizers_are_checkpoint_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"5", b"null", b"\xff", b"[" * 100_000], ids=lambda c: repr(c)[:9]
)
def test_broken_settings_are_checkpoint_errors(directory: Path, content: bytes) -> None:
    (directory / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*download it again"):
        Tokenizer.load(directory)


def test_a_template_that_is_no_text_is_a_checkpoint_error(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        Tokenizer.load(directory)


def test_special_ids(directory: Path) -> None:
    bare = load(directory)
    # The mask is known by its name; nothing is guessed for eos and pad.
    assert bare.mask_token_id == bare.token_id("<|mask|>") is not None
    assert bare.eos_token_id is None and bare.pad_token_id is None
    named = load(
        directory,
        {"eos_token": "<|endoftext|>", "pad_token": {"content": "<|role_end|>"}, "mask_token": "A"},
    )
    assert named.eos_token_id == named.token_id("<|endoftext|>") is not None
    assert named.pad_token_id == named.token_id("<|role_end|>") is not None
    assert named.mask_token_id == named.token_id("A")
    strange = load(directory, {"eos_token": 5, "pad_token": {"content": 5}, "mask_token": "none"})
    assert strange.eos_token_id is None and strange.pad_token_id is None
    assert strange.mask_token_id == bare.mask_token_id


@pytest.mark.parametrize("text", ["", "What is 12 + 30?", "é ☃ 🙂\n\t", '{"answer": 42}', "\x00"])
def test_text_survives(directory: Path, text: str) -> None:
    tokenizer = load(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_recognised_and_left_out(directory: Path) -> None:
    tokenizer = load(directory)
    text = "<role>HUMAN</role>hi<|role_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.token_id("<|role_end|>") == ids[-1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "HUMANhi"


def test_half_a_surrogate_pair_is_an_input_error(directory: Path) -> None:
    with pytest.raises(InputError, match="Unicode"):
        load(directory).encode("a\ud800")


# --- the LLaDA2 template


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [user("Q")],
            "<role>SYSTEM</role>detailed thinking off<|role_end|>"
            "<role>HUMAN</role>Q<|role_end|><role>ASSISTANT</role>",
        ),
        (
            [{"role": "system", "content": "S"}, user("Q")],
            "<role>SYSTEM</role>S\ndetailed thinking off<|role_end|>"
            "<role>HUMAN</role>Q<|role_end|><role>ASSISTANT</role>",
        ),
        (
            [user("a"), {"role": "assistant", "content": "b"}, user("c\n")],
            "<role>SYSTEM</role>detailed thinking off<|role_end|>"
            "<role>HUMAN</role>a<|role_end|><role>ASSISTANT</role>b<|role_end|>"
            "<role>HUMAN</role>c\n<|role_end|><role>ASSISTANT</role>",
        ),
    ],
    ids=["one turn", "system", "several turns"],
)
def test_llada2_conversations(
    directory: Path, messages: list[dict[str, str]], expected: str
) -> None:
    tokenizer = load(directory, template=LLADA2)
    assert tokenizer.apply_chat_template(messages) == expected
    without = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert without + "<role>ASSISTANT</role>" == expected


def test_messages_are_not_markup(directory: Path) -> None:
    text = "<b>{{ 1 + 1 }}</b> & \"'{% if %}"
    assert text in load(directory, template=LLADA2).apply_chat_template([user(text)])


def test_raise_exception_is_an_input_error(directory: Path) -> None:
    with pytest.raises(InputError, match="unknown role robot"):
        load(directory, template=LLADA2).apply_chat_template([{"role": "robot", "content": ""}])


@pytest.mark.parametrize("messages", [None, 5, [5], ["text"], [[1]]])
def test_messages_of_the_wrong_kind(directory: Path, messages: Any) -> None:
    with pytest.raises(InputError, match="chat template refused"):
        load(directory, template=LLADA2).apply_chat_template(messages)


# --- where templates come from, what they may do


def test_the_file_of_its_own_wins(directory: Path) -> None:
    settings = {"chat_template": "from settings"}
    assert load(directory, settings).apply_chat_template([]) == "from settings"
    assert load(directory, template="from file").apply_chat_template([]) == "from file"


@pytest.mark.parametrize("settings", [{}, {"chat_template": None}, {"chat_template": 5}])
def test_a_missing_template_says_so(directory: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"no chat template.*--raw"):
        load(directory, settings).apply_chat_template([user("x")])


def render(directory: Path, template: str, **variables: Any) -> str:
    settings = {"bos_token": "<B>", "eos_token": {"content": "<E>"}}
    return load(directory, settings, template).apply_chat_template([user("é")], **variables)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ mask_token }}", "<B>|<E>|"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é"}'),
        ("{{ [1, {'a': none}] | tojson(indent=1) }}", '[\n 1,\n {\n  "a": null\n }\n]'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{{ 'é' | tojson(ensure_ascii=False) }}", '"é"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ '<&' | tojson }}", '"<&"'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("{% if tools %}t{% else %}n{% endif %}", "n"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_rely_on(directory: Path, template: str, expected: str) -> None:
    assert render(directory, template) == expected


def test_date_and_variables(directory: Path) -> None:
    year = render(directory, "{{ strftime_now('%Y') }}")
    assert len(year) == 4 and year.isdigit()
    assert render(directory, "{{ thinking }}{{ tools | length }}", thinking=1, tools=[2, 3]) == "12"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ 5 | dictsort }}",
        "{{ 'a' | nosuchfilter }}",
        "{{ strftime_now(5) }}",
        "{{ cycler | tojson }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if %}",
        "{{",
        "{% generation %}",
    ],
)
def test_templates_that_are_refused(directory: Path, template: str) -> None:
    with pytest.raises(InputError, match="chat template refused"):
        render(directory, template)


def test_classes_do_not_show(directory: Path) -> None:
    # The sandbox answers with nothing, as it does for Transformers.
    assert render(directory, "[{{ ''.__class__ }}]") == "[]"


def test_the_callers_messages_stay_as_they_are(directory: Path) -> None:
    messages = [user("x")]
    load(directory, template="{% set ns = namespace(m=messages) %}{{ ns.m[0].role }}")
    assert load(directory).apply_chat_template(messages) == "user"
    assert messages == [user("x")]


# --- SDAR's template, and tags of tool calls


def chatml(directory: Path) -> Tokenizer:
    """The demo's words with Qwen's turns, as SDAR's tokenizer_config.json names them."""
    special = ("<|im_start|>", "<|im_end|>", "<|MASK|>", "<tool_call>", "</tool_call>")
    values = json.loads((directory / "tokenizer.json").read_text())
    first = max(token["id"] for token in values["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"] += [
        {"id": first + i, "content": content, "special": True, **flags}
        for i, content in enumerate(special)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return load(directory, {"chat_template": CHATML, "eos_token": "<|im_end|>"})


def test_chatml(directory: Path) -> None:
    tokenizer = chatml(directory)
    plain = tokenizer.apply_chat_template([user("Hi")])
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    silent = tokenizer.apply_chat_template([user("Hi")], enable_thinking=False)
    assert silent == plain + "<think>\n\n</think>\n\n"
    turns = [
        {"role": "system", "content": "Be brief."},
        user("1+1?"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        user("And 2+2?"),
    ]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nAnd 2+2?<|im_end|>\n"
    )
    # Turns are special tokens to the tokenizer, and no part of an answer.
    ids = tokenizer.encode(plain)
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert tokenizer.eos_token_id in ids and tokenizer.mask_token_id is not None
    assert tokenizer.decode(ids) == "user\nHi\nassistant\n"


def test_tools_in_chatml(directory: Path) -> None:
    tokenizer = chatml(directory)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    check_tool_template(tokenizer, [user("What time?")], tools)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        user("What time?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=tools)
    assert json.dumps(tools[0]) in text and "<tools>\n" in text
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_tags_of_calls_are_text_though_the_tokenizer_calls_them_special(
    directory: Path, tag: str
) -> None:
    """Else calls that a model makes on its own were lost with them."""
    tokenizer = chatml(directory)
    answer = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>'
    ids = tokenizer.encode(answer)
    assert tokenizer.token_id(tag) in ids, "still one token"
    text = tokenizer.decode(ids)
    assert text == answer.removesuffix("<|im_end|>")
    content, calls = ToolCallParser().feed(text, is_last=True)
    assert content == "" and [(c.name, c.arguments) for c in calls] == [("now", '{"zone": "UTC"}')]
