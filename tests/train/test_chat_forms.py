"""Conversations in OpenAI's and ShareGPT's forms, for supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import IGNORED
from slurmft.train.login import chats, inputs
from slurmft.train.login.formats import Chats
from tests.support.models import CHAT_TEMPLATE, write_decoder
from tests.train.test_language import ANSWER, USER, config_of, task_of, write_rows

SHAREGPT = [
    {"from": "system", "value": "fear"},
    {"from": "human", "value": "joy word1"},
    {"from": "gpt", "value": "love"},
]
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "word1", "arguments": '{"word2": "word3"}'},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "word1", "parameters": {"type": "object"}},
    }
]
CALLS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "word3"},
    {"role": "assistant", "content": "love"},
]
PARTS = [{"type": "text", "text": "joy"}, {"type": "text", "text": " word1"}]
AS_PARTS = [{"role": "user", "content": PARTS}, ANSWER]

WRITES_ALL = """
{%- if tools %}<|system|> {{ tools | tojson }}<|end|>
{% endif %}
{%- for m in messages %}<|{{ m.role }}|> {{ '' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}{% for part in m.content or () %}{{ part.text }}{% endfor %}{% endif %}
    {%- for call in m.tool_calls or () %} {{ call.function.name }} {{ '' }}
        {%- for key, value in call.function.arguments.items() %}{{ key }} {{ value }}
        {%- endfor %}
    {%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""As templates of models for tools and several kinds of content write conversations."""
ARGUMENTS_ARE_TEXTS = WRITES_ALL.replace(
    "{%- for key, value in call.function.arguments.items() %}{{ key }} {{ value }}",
    "{%- for one in (1,) %}{{ call.function.arguments + '' }}",
)
NEEDS_CONTENT = WRITES_ALL.replace("{{ m.content }}", "{{ m.content + '' }}").replace(
    "m.content is string", "m.content is string or m.content + ''"
)


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as transformers' documentation wants them."""
    text = json.dumps(messages)
    return list(
        json.loads(text.replace(json.dumps('{"word2": "word3"}'), '{"word2": "word3"}'))
    )


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (WRITES_ALL, CALLS),
        (WRITES_ALL, with_objects(CALLS)),
        (WRITES_ALL, AS_PARTS),
        (WRITES_ALL, [USER, ANSWER | {"name": None, "tool_calls": None}]),
        (ARGUMENTS_ARE_TEXTS, CALLS),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS, json.dumps(TOOLS)])
def test_tokens_are_those_of_apply_chat_template(
    template: str, row: list[dict[str, Any]], tools: Any, tmp_path: Path
) -> None:
    """By the library and its conventions; the same on the login node."""
    model = write_decoder(tmp_path / "model", template=template)
    data = write_rows(tmp_path / "data", {"messages": row, "tools": tools})
    given = {} if tools is None else {"tools_column": "tools"}
    inputs.check(config_of(data, model, **given))
    table = task_of(data, model, **given).prepare().train
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer.apply_chat_template(
        row if template is ARGUMENTS_ARE_TEXTS else with_objects(row),
        tools=TOOLS if tools else None,
        tokenize=False,
    )
    assert table.tokens.tolist() == tokenizer(expected)["input_ids"]
    # Calls are learnt as answers are.
    assert table.token_labels is not None
    words = tokenizer.convert_ids_to_tokens(
        [label for label in table.token_labels.tolist() if label != IGNORED]
    )
    assert words[-2:] == ["love", "<|end|>\n"] or "<|end|>" in words
    if len(row) == len(CALLS) and template is WRITES_ALL:
        assert words[0] == "word1"


def test_sharegpt_is_the_same_conversation(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model")
    data = write_rows(tmp_path / "data", {"conversations": SHAREGPT})
    with pytest.raises(UsageError, match="has no column 'messages'") as error:
        inputs.check(config_of(data, model))
    assert "it has conversations; choose with --text-column" in str(error.value.hint)
    given = {"text_column": "conversations"}
    inputs.check(config_of(data, model, **given))
    found = task_of(data, model, **given).prepare()
    messages = [{"role": "system", "content": "fear"}, USER, ANSWER]
    same = write_rows(tmp_path / "same", {"messages": messages})
    expected = task_of(same, model).prepare()
    assert found.train.tokens.tolist() == expected.train.tokens.tolist()
    assert found.train.token_labels is not None
    assert found.train.token_labels.tolist() == expected.train.token_labels.tolist()  # type: ignore[union-attr]


def test_columns_of_parquet_have_every_key(tmp_path: Path) -> None:
    """A struct holds null for each key that another message has."""
    model = write_decoder(tmp_path / "model", template=WRITES_ALL)
    rows: list[dict[str, Any]] = [{"messages": CALLS}, {"messages": [USER, ANSWER]}]
    data = write_rows(tmp_path / "data", *rows)
    expected = task_of(data, model).prepare().train.tokens.tolist()
    for split in ("train", "validation"):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), data / f"{split}.parquet"
        )
        (data / f"{split}.jsonl").unlink()
    assert task_of(data, model).prepare().train.tokens.tolist() == expected


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (CHAT_TEMPLATE, CALLS[:2], "does not write the tool call 'word1'"),
        (CHAT_TEMPLATE, CALLS, "refuses it, which has tool calls: no tools here"),
        (CHAT_TEMPLATE, AS_PARTS, "does not write a content in several parts"),
        (
            CHAT_TEMPLATE.replace("m.content", "m.content + ''"),
            AS_PARTS,
            "refuses it, which has a content in several parts",
        ),
    ],
)
def test_what_a_template_does_not_write(
    template: str, row: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    """Refused at submission with file and row, though it is far behind, and by the job."""
    model = write_decoder(tmp_path / "model", template=template)
    good = {"messages": [USER, ANSWER]}
    data = write_rows(tmp_path / "data", *[good] * 60, {"messages": row})
    where = rf"'{data}/train.jsonl': row 61: the chat template of .* {message}"
    for read in (
        lambda: inputs.check(config_of(data, model)),
        lambda: task_of(data, model).prepare(),
    ):
        with pytest.raises(UsageError, match=where) as error:
            read()
        assert "chat_template.jinja beside" in str(error.value.hint)


def test_null_where_a_template_needs_a_content(tmp_path: Path) -> None:
    """It is written as no text."""
    model = write_decoder(tmp_path / "model", template=NEEDS_CONTENT)
    data = write_rows(tmp_path / "data", {"messages": CALLS})
    inputs.check(config_of(data, model))
    found = task_of(data, model).prepare().train
    without_null = write_decoder(tmp_path / "other", template=WRITES_ALL)
    expected = task_of(data, without_null).prepare().train
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": [{"type": "image_url"}]}, "a part of the type 'image_url'"),
        ({"content": [{"text": "joy"}]}, r"the messages \["),
        ({"content": ["joy"]}, r"the messages \["),
        ({"content": None, "function_call": {"name": "joy"}}, "a function_call, which"),
        ({"content": None, "tool_calls": [{"name": "joy"}]}, r"the messages \["),
        (
            {"tool_calls": [CALL | {"function": {"name": "joy", "arguments": "{"}}]},
            "a tool call whose arguments are no JSON: '{'",
        ),
        (
            {"content": None, "tool_calls": []},
            "no content, or null, in message 2, of the",
        ),
        ({}, "no content, or null, in message 2, of the role 'assistant'"),
        ({"role": "user"}, "no content, or null, in message 2, of the role 'user'"),
        ({"content": 5}, r"the messages \["),
    ],
)
def test_messages_that_are_none(
    message: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = write_decoder(tmp_path / "model", template=WRITES_ALL)
    row = {"messages": [USER, {"role": "assistant"} | message]}
    data = write_rows(tmp_path / "data", {"messages": [USER, ANSWER]}, row)
    with pytest.raises(UsageError, match=f"row 2 has {problem}"):
        inputs.check(config_of(data, model))


@pytest.mark.parametrize("check", ["check", "check_inputs"])
def test_number_of_a_message_behind_a_system_column(check: str) -> None:
    """Messages have their numbers in the row, whatever stands beside them."""
    form = Chats(("messages", "system", "tools", "functions"))
    null = {"role": "user", "content": None}
    columns = [[[USER, ANSWER, null, ANSWER]], ["be brief"], [None], [None]]
    with pytest.raises(UsageError, match="row 1 has no content, or null, in message 3"):
        getattr(form, check)(columns, "train")


@pytest.mark.parametrize("tools", ["{", "word1", ["word1"], {"name": "word1"}])
def test_tools_that_are_none(tools: Any, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model", template=WRITES_ALL)
    row = {"messages": [USER, ANSWER], "tools": tools}
    data = write_rows(tmp_path / "data", row)
    with pytest.raises(UsageError, match="row 1 has the tools"):
        inputs.check(config_of(data, model, tools_column="tools"))


def test_a_content_of_one_part_is_its_text() -> None:
    one = [{"role": "user", "content": PARTS[:1]}, {"role": "user", "content": []}]
    assert [each["content"] for each in chats.messages_of(one)] == ["joy", ""]


MARKS_LEARNT = """
{%- for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' and m.weight != 0 %}
    {%- generation %}{{ m.content }}<|end|>
{% endgeneration %}{% else %}{{ m.content }}<|end|>
{% endif %}{% endfor %}"""
"""As `CHAT_TEMPLATE`, with a mark of what transformers is to count as the assistant's."""


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0.0, 1.0, None)])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_turn_of_weight_0_is_not_learnt(
    weights: tuple[Any, ...], split: str, tmp_path: Path
) -> None:
    """The tokens that transformers masks as the assistant's."""
    model = write_decoder(tmp_path / "model")
    row = []
    for weight in weights:
        row += [USER, ANSWER | {"weight": weight}]
    data = write_rows(tmp_path / "data", {"messages": row})
    inputs.check(config_of(data, model))
    table = getattr(task_of(data, model).prepare(), split)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer.apply_chat_template(
        [{k: v for k, v in each.items() if v is not None} for each in row],
        chat_template=MARKS_LEARNT,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert table.tokens.tolist() == expected["input_ids"]
    is_learnt = [False, *(table.token_labels[:-1] != IGNORED)]
    assert is_learnt == [bool(each) for each in expected["assistant_masks"]]


def test_nothing_is_put_behind_a_turn_that_is_not_learnt(tmp_path: Path) -> None:
    """Whose template ends no turn: the end-of-text token would be learnt."""
    ends_none = CHAT_TEMPLATE.replace("<|end|>\n", " ")
    model = write_decoder(tmp_path / "model", template=ends_none)
    row = [USER, ANSWER, USER, ANSWER | {"weight": 0}]
    data = write_rows(tmp_path / "data", {"messages": row})
    found = task_of(data, model).prepare().train
    words = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(
        found.tokens.tolist()
    )
    assert words[-1] == "love"
    assert (found.token_labels != IGNORED).sum() == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER, ANSWER | {"weight": 0.5}], "a message of the weight 0.5, which is 0"),
        ([USER, ANSWER | {"weight": "0"}], "a message of the weight '0'"),
        ([USER, ANSWER | {"weight": False}], "a message of the weight False"),
        ([USER | {"weight": 1}, ANSWER], "a message of the role 'user' and the weight"),
        ([USER, ANSWER | {"weight": 0}], "no message of the assistant that is learnt"),
        ([USER, ANSWER | {"train": False}], "the key 'train' in a message: a turn of"),
        ([USER, ANSWER | {"loss": True}], "the key 'loss' in a message"),
    ],
)
def test_what_says_otherwise_what_is_learnt(
    messages: list[dict[str, Any]], problem: str, tmp_path: Path
) -> None:
    model = write_decoder(tmp_path / "model")
    data = write_rows(
        tmp_path / "data", {"messages": [USER, ANSWER]}, {"messages": messages}
    )
    with pytest.raises(UsageError, match=f"row 2 has {problem}"):
        inputs.check(config_of(data, model))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_system_turn_beside_the_conversation(suffix: str, tmp_path: Path) -> None:
    """It is the first turn; not every row needs one."""
    model = write_decoder(tmp_path / "model")
    beside = {"conversations": SHAREGPT[1:], "system": "fear"}
    rows: list[dict[str, Any]] = [{"conversations": SHAREGPT[1:]}, beside]
    data = write_rows(tmp_path / "data", *rows)
    if suffix == "parquet":
        for split in ("train", "validation"):
            (data / f"{split}.jsonl").unlink()
            table = pyarrow.table(
                {
                    "conversations": [SHAREGPT[1:]] * 2,
                    "system": [None, "fear"],
                }
            )
            pyarrow.parquet.write_table(table, data / f"{split}.parquet")
    given = {"text_column": "conversations"}
    inputs.check(config_of(data, model, **given))
    found = task_of(data, model, **given).prepare().train
    same = write_rows(
        tmp_path / "same", {"messages": SHAREGPT[1:]}, {"messages": SHAREGPT}
    )
    assert found.tokens.tolist() == task_of(same, model).prepare().train.tokens.tolist()


@pytest.mark.parametrize(
    ("system", "problem"),
    [
        ("joy", "a text in the column 'system' and a system turn of its own"),
        (3, "3 in the column 'system', which is no text"),
    ],
)
def test_a_system_turn_that_cannot_be(
    system: Any, problem: str, tmp_path: Path
) -> None:
    model = write_decoder(tmp_path / "model")
    row = {"messages": SHAREGPT, "system": system}
    data = write_rows(tmp_path / "data", row)
    with pytest.raises(UsageError, match=f"row 1 has {problem}"):
        inputs.check(config_of(data, model))


def test_what_nothing_reads_is_named(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model")
    thought = ANSWER | {"reasoning_content": "word1", "name": "word2"}
    row = {"messages": [USER, thought], "tools": TOOLS}
    first = {"messages": [USER, ANSWER], "tools": None}
    data = write_rows(tmp_path / "data", first, row)
    _, remarks = inputs.look(config_of(data, model))
    named = [each for each in remarks if "nothing reads" in each and "train" in each]
    assert any("the column 'tools' (--tools-column tools" in each for each in named)
    assert any("the key 'reasoning_content' of messages" in each for each in named)
    assert all("row 2 is the first" in each for each in named)
    assert len(named) == 2
    _, remarks = inputs.look(config_of(data, model, tools_column="tools"))
    assert not any("'tools'" in each for each in remarks)
