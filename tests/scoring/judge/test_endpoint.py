"""The endpoint against a server that misbehaves: patience with what passes, an end to everything, no key anywhere."""

from __future__ import annotations

import json
import logging
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from support.judges import KEY, drip_body, drip_headers, hang, say, send

from kvbench.scoring.judge import JudgeError, KeyRefused, endpoint
from kvbench.scoring.judge.endpoint import Endpoint


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made; none is."""
    pauses: list[float] = []
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


def judge(server, **changes) -> Endpoint:
    settings = dict(url=server.url, model="judge-1", key_env="JUDGE_KEY", through_proxy=False)
    return Endpoint(**settings | changes)


def test_what_is_sent_and_what_comes_back(serve):
    server = serve(say("Fine. [[7]]"))
    reply = judge(server).ask("be fair", "rate {this}")
    assert (reply.text, reply.model) == ("Fine. [[7]]", "judge-1 (judge-1-0711)")
    (got,) = server.got
    assert got.path == "/v1/chat/completions"
    assert got.headers["authorization"] == f"Bearer {KEY}"
    assert got.body == {
        "model": "judge-1",
        "messages": [{"role": "system", "content": "be fair"}, {"role": "user", "content": "rate {this}"}],
        "temperature": 0,
        "max_tokens": 2048,
    }
    assert judge(server, url=server.url + "/chat/completions/").ask("", "").text == "Fine. [[7]]"
    assert server.got[1].path == "/v1/chat/completions"


def test_without_a_key_none_is_sent(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "")
    server = serve(say("[[7]]"))
    judge(server).ask("", "")
    assert "authorization" not in server.got[0].headers


def test_pauses_grow_to_a_limit_and_end(serve, slept):
    server = serve(send(500))
    with pytest.raises(JudgeError, match="no answer in 6 tries; the last try failed: HTTP status 500"):
        judge(server, tries=6, pause=1.0, longest_pause=5.0).ask("", "")
    assert len(server.got) == 6
    assert slept == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_what_passes_is_waited_for(serve, slept):
    server = serve(send(429), send(503), send(408), say("[[9]]"))
    assert judge(server).ask("", "").text == "[[9]]"
    assert slept == [1.0, 2.0, 4.0]


def test_retry_after_is_honoured_up_to_a_limit(serve, slept):
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    asked = ("7", "0", soon, "86400", "-3", "nan", "soon", "9" * 400)
    server = serve(*(send(429, Retry_After=value) for value in asked), say("[[1]]"))
    judge(server, tries=9, pause=1.0, longest_pause=60.0).ask("", "")
    by_date = slept.pop(2)
    assert 20 < by_date <= 30
    assert slept == [7.0, 2.0, 60.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize("act", [hang, drip_headers, drip_body])
def test_a_server_that_does_not_finish(serve, slept, act):
    server = serve(act)
    with pytest.raises(JudgeError, match=r"in 2 tries; the last try failed: no response within 1 s"):
        judge(server, seconds=1.0, tries=2).ask("", "")
    assert len(server.got) == 2


def test_nobody_there(slept):
    with pytest.raises(JudgeError, match=r"no connection \(ConnectError\)"):
        Endpoint(url="http://127.0.0.1:1/v1", model="m", key_env="NONE", through_proxy=False).ask("", "")
    assert len(slept) == 4


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>busy</html>",
        b"\xff\xfe",
        "[" * 100_000,
        "[]",
        "null",
        '{"choices": []}',
        '{"choices": [{"message": {"content": null}}]}',
        '{"choices": [{"message": {"content": ["[[9]]"]}}]}',
        '{"choices": "[[9]]"}',
    ],
)
def test_garbage_is_an_error_at_once(serve, slept, body):
    server = serve(send(200, body))
    with pytest.raises(JudgeError, match="not a chat completion"):
        judge(server).ask("", "")
    assert len(server.got) == 1
    assert slept == []


def test_an_endless_answer_is_cut_off(serve):
    sent = []

    def pour(handler, got):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(64):
            handler.wfile.write(b" " * 2**20)
            sent.append(1)

    with pytest.raises(JudgeError, match="more than the limit of 4 MiB"):
        judge(serve(pour)).ask("", "")
    assert len(sent) < 64


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_it_at_once(serve, slept, status):
    server = serve(send(status, json.dumps({"error": {"message": f"no key {KEY}"}})))
    with pytest.raises(KeyRefused) as error:
        judge(server).ask("", "")
    assert str(error.value) == (
        f"the judge refused the key in JUDGE_KEY (HTTP status {status}). Answers are saved; set a valid key, then "
        "'kvbench score RUN' scores them."
    )
    assert error.value.exit_code == 3
    assert len(server.got) == 1
    assert slept == []


def test_a_key_that_is_wanted(serve, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(KeyRefused, match="needs a key, but JUDGE_KEY is empty"):
        judge(serve(send(401))).ask("", "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(serve, status):
    other = serve(say("[[10]]"))
    server = serve(send(status, Location=other.url + "/chat/completions"))
    with pytest.raises(JudgeError, match="redirects are not followed"):
        judge(server).ask("", "")
    assert other.got == []


def test_other_refusals_say_why_without_the_key(serve, slept):
    said = json.dumps({"error": {"message": f"no model x\x1b[2J for\n{KEY} (Bearer {KEY})"}})
    with pytest.raises(JudgeError) as error:
        judge(serve(send(404, said))).ask("", "")
    assert str(error.value).startswith("the judge answered with HTTP status 404: 'no model x\\x1b[2J for ***")
    assert KEY not in str(error.value)
    with pytest.raises(JudgeError, match=r"with HTTP status 400$"):
        judge(serve(send(400, "plain text"))).ask("", "")
    assert slept == []


def test_no_proxy_of_the_environment_for_this_machine(serve, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert judge(serve(say("[[7]]"))).ask("", "").text == "[[7]]"


def test_many_threads(serve):
    server = serve(lambda handler, got: say(got.user)(handler, got))
    asked = judge(server)
    with ThreadPoolExecutor(8) as pool:
        replies = [r.text for r in pool.map(lambda i: asked.ask("", f"[[{i}]]"), range(32))]
    assert replies == [f"[[{i}]]" for i in range(32)]


def test_the_key_shows_nowhere(serve, slept, caplog):
    """Each way to fail, with everything logged and every local variable of every frame printed."""
    for name in (None, "httpx", "httpcore", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    echo = json.dumps({"error": {"message": KEY}, "model": KEY})
    seen = []
    for act in (send(500), send(401, echo), send(400, echo), send(200, echo), send(302, Location="/"), hang):
        asked = judge(serve(act), tries=2, seconds=0.2)
        with pytest.raises((JudgeError, KeyRefused)) as caught:
            asked.ask("system", "user")
        stack = traceback.TracebackException.from_exception(caught.value, capture_locals=True).stack
        own = [frame.locals for frame in stack if frame.filename != __file__]
        seen += [repr(asked), repr(caught.value), repr(own)]
    seen.append(judge(serve(say("[[7]]", model=f"m {KEY}"))).ask("", "").model)
    text = caplog.text + "".join(seen)
    assert "HTTP Request: POST" in text
    assert "'self': " in text  # the variables of the frames were seen
    assert KEY not in text
    assert KEY[8:] not in text
