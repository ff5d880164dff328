"""Secrets in texts that somebody else has written."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.wire.redaction import DEFAULT_NAMES
from umbel.wire.secret_texts import Names, mask_addresses, secret_names

SECRET = "hunter2-Zq"
NAMES = secret_names(DEFAULT_NAMES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=SECRET", "password=**"),
        ("host=h password = SECRET user=bob", "host=h password = ** user=bob"),
        ("pin: SECRET.", "pin: **"),
        ("PWD=SECRET;UID=y", "PWD=**"),
        ("password=a,SECRET port=5", "password=** port=5"),
        ("password=a)b'c&SECRET", "password=**&SECRET"),
        ("(password=SECRET)", "(password=**)"),
        ("{'token': 'SECRET', 'n': 1}", "{'token': '**', 'n': 1}"),
        ('{"token": "SECRET", "n": 1}', '{"token": "**", "n": 1}'),
        ('{"token":"SECRET","n":1}', '{"token":"**","n":1}'),
        ('{\\"token\\": \\"SECRET\\"}', '{\\"token\\": \\"**\\"}'),
        ("{'card number': SECRET}", "{'card number': **}"),
        ("{'password': ['SECRET', 'b'], 'x': 1}", "{'password': **, 'x': 1}"),
        ("User(password=SecretStr('SECRET'), y=2)", "User(password=**, y=2)"),
        ("<User password=<Secret SECRET> y=2>", "<User password=** y=2>"),
        ("password='it\\'s SECRET' x", "password='**' x"),
        ("password='it''s SECRET' x", "password='**' x"),
        ("password='SECRET", "password='**"),
        ("secret=b'SECRET'", "secret=b'**'"),
        ("b'password=SECRET'", "b'password=**'"),
        ("Authorization: Bearer SECRET", "Authorization: **"),
        ("{'Authorization': 'Bearer SECRET'}", "{'Authorization': '**'}"),
        ("auth=Bearer SECRET x", "auth=** x"),
        ("Cookie: a=b; c=SECRET\nnext", "Cookie: **\nnext"),
        ("https://h/x?api_key=SECRET&y=2", "https://h/x?api_key=**&y=2"),
        ("session:token:SECRET", "session:token:**"),
        ("2fa_token=SECRET", "2fa_token=**"),
        ("password=**SECRET", "password=**"),
        ("redis://u:p'SECRET@h", "redis://u:**@h"),
        ("redis://user:SECR...", "redis://user:**"),
        ("'redis://user:12345'...", "'redis://user:**'..."),
        ("https://token:SECRET@github.com/x", "https://token:**@github.com/x"),
        ("redis://u:SECRET@[::1]:6379", "redis://u:**@[::1]:6379"),
        ('["redis://u:SECRET@h","b@c"]', '["redis://u:**@h","b@c"]'),
    ],
)
def test_what_a_text_names_as_a_secret_is_hidden(text: str, shown: str) -> None:
    assert NAMES.masked(text.replace("SECRET", SECRET)) == shown.replace("SECRET", SECRET)


@pytest.mark.parametrize(
    "text",
    [
        "", "ok", "a: b, c=d", "12:30:45", "jwt.TokenError: expired at 5", "assert token == 5",
        "if password:\n    raise X", "password=None, token=True, secret=null", "password='**'",
        "password=**", "redis://h:6379/0", "http://[::1]:8080/x", "mongodb://h1:1,h2:2/x",
        "see http://h:8080/a?mail=x@y and me@home", "tokenizer=fast", "password=",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays_and_is_not_copied(text: str) -> None:
    assert NAMES.masked(text) is text


def test_without_names_nothing_is_hidden() -> None:
    text = "redis://u:pw@h password=x"
    assert Names([]).masked(text) is text
    assert mask_addresses(text) == "redis://u:**@h password=x"


pieces = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["password", "'token'", '"pin"', "=", ": ", "://", "@", "'", '"', "\\", "(", ")", "[", "{",
         "}", "<", ">", ",", ";", " ", "\n", "**", "...", "None", "redis://u:", "Bearer ", "b'"]
    ),
)  # fmt: skip


@given(st.lists(pieces, max_size=30).map("".join))
def test_what_was_hidden_once_passes_as_it_is(text: str) -> None:
    shown = NAMES.masked(text)
    assert NAMES.masked(shown) == shown


words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=10)


@given(
    words, st.sampled_from(["password", "api_key", "X-Token"]),
    st.sampled_from([" = '{}'", "={}", ": {}", "=({!r}, 1)", "=Secret({!r})"]), words,
)  # fmt: skip
def test_no_value_after_a_secret_name_is_shown(
    before: str, name: str, form: str, after: str
) -> None:
    text = f"{before} {name}{form.format(SECRET)} {after}"
    assert SECRET not in NAMES.masked(text)


@given(st.dictionaries(st.sampled_from(["password", "n"]), st.text(max_size=8).map(SECRET.__add__)))
def test_no_secret_of_a_mapping_is_shown_as_python_or_json_writes_it(value: dict[str, str]) -> None:
    value.pop("n", None)
    for text in (repr(value), json.dumps(value), json.dumps(json.dumps(value)), repr(repr(value))):
        assert SECRET not in NAMES.masked(text)


@pytest.mark.parametrize(
    "piece",
    ["a://b:c", "a://b:c'@", "a://b:c'", "password=", "pin='\n", "pin=\\'\n", "pin=(", "a.", "a=b ",
     "'", "\"'", ":", "=", "a+", "'a' ", "pin='a\\'", "token=<"],
)  # fmt: skip
def test_no_text_takes_long(piece: str) -> None:
    def cost_s(chars: int) -> float:
        text = piece * (chars // len(piece))
        began = time.process_time()
        NAMES.masked(text)
        return time.process_time() - began

    assert cost_s(1_000_000) < 10.0  # a quadratic one takes minutes
