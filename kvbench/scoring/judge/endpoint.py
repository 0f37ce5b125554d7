"""A judge behind an OpenAI-compatible address: POST {base URL}/chat/completions.

Patient with what passes (429, server errors, time-outs: some tries with growing pauses, Retry-After up to a limit) and
with nothing else. One question takes at most `seconds` a try, whatever the server does. Redirects are not followed. The
key goes into the request as it is sent: it is in no field, exception, note or log, and taken out of what the server
says.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from kvbench.console.redact import HIDDEN, redact_text
from kvbench.errors import show
from kvbench.scoring.judge.api import MAX_TOKENS, JudgeError, KeyRefused, Reply

if TYPE_CHECKING:
    import httpx

BODY_LIMIT = 4 * 1024 * 1024  # bytes; a reply of 2048 tokens has about 10 kB
REFUSED = (401, 403)
PASSING = (408, 425, 429)  # beside 5xx
SHOWN = 200  # characters of what a server says


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """See `kvbench.scoring.judge.api.Judge`.

    Args:
        url: base URL, with or without the final ``/chat/completions``.
        key_env: environment variable with the key; an empty one sends no key.
        seconds: limit of one try, from the connection to the last byte.
        tries, pause, longest_pause: how often a question is put, and the seconds between, doubling up to the longest.
        through_proxy: use the proxy of the environment (HTTPS_PROXY), if there is one.
    """

    url: str
    model: str
    key_env: str
    seconds: float = 120.0
    tries: int = 5
    pause: float = 1.0
    longest_pause: float = 60.0
    through_proxy: bool = True

    def ask(self, system: str, user: str) -> Reply:
        import httpx

        request = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        failure = ""
        for pause in self._pauses():
            asked_for = None
            try:
                answer = asyncio.run(self._post(request))
            except TimeoutError:
                failure = f"nothing within {self.seconds:g} s"
            except (httpx.HTTPError, OSError) as error:  # their texts may quote what the server sent
                failure = f"no connection ({type(error).__name__})"
            else:
                if answer.status not in PASSING and answer.status < 500:
                    return self._read(answer)
                failure, asked_for = f"status {answer.status}", _retry_after(answer.headers)
            if pause is not None:
                time.sleep(min(max(pause, asked_for or 0.0), self.longest_pause))
        raise JudgeError(f"the judge gave no answer in {self.tries} tries; the last: {failure}")

    def _pauses(self) -> Iterator[float | None]:
        """What to wait after each try; nothing after the last."""
        yield from (min(self.pause * 2**n, self.longest_pause) for n in range(self.tries - 1))
        yield None

    async def _post(self, request: Mapping[str, Any]) -> _Answer:
        """One try. asyncio, because only there one limit holds for connecting, headers and body together."""
        import httpx

        address = f"{self.url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        headers = {"Accept-Encoding": "identity"}  # no compressed body that grows here
        async with (
            asyncio.timeout(self.seconds),
            httpx.AsyncClient(timeout=None, trust_env=self.through_proxy, headers=headers) as client,
            client.stream("POST", address, json=request, auth=self._sign, follow_redirects=False) as response,
        ):
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > BODY_LIMIT:
                    raise JudgeError(f"the judge's answer has more than {BODY_LIMIT // 2**20} MB")
            return _Answer(response.status_code, response.headers, self._hide(body.decode(errors="replace")))

    def _sign(self, request: httpx.Request) -> httpx.Request:
        if key := self._key():
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    def _key(self) -> str:
        return os.environ.get(self.key_env, "").strip()

    def _read(self, answer: _Answer) -> Reply:
        """The reply in a final answer. Raises JudgeError and KeyRefused."""
        if answer.status in REFUSED:
            refused, empty = f"refused the key from {self.key_env}", f"wants a key, and {self.key_env} is empty"
            said = refused if self._key() else empty
            raise KeyRefused(f"the judge {said} ({answer.status}). Answers are saved; 'kvbench score RUN' continues.")
        if 300 <= answer.status < 400:
            raise JudgeError(f"the judge's address redirects (status {answer.status}); redirects are not followed")
        parsed = _parse(answer.body)
        if answer.status != 200:
            said = self._clean(_at(parsed, "error", "message"))
            raise JudgeError(f"the judge answered with status {answer.status}{said and f': {show(said)}'}")
        text = _at(parsed, "choices", 0, "message", "content")
        if not isinstance(text, str):
            raise JudgeError("the judge's answer is not a chat completion")
        named = self._clean(_at(parsed, "model"))
        return Reply(text, f"{self.model} ({named})" if named and named != self.model else self.model)

    def _hide(self, text: str) -> str:
        """Text of the server, which may repeat our key."""
        key = self._key()
        return text.replace(key, HIDDEN) if key else text

    def _clean(self, said: object) -> str:
        """What a server says of itself, as one short line."""
        return " ".join(redact_text(self._hide(said)).split())[:SHOWN] if isinstance(said, str) else ""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: str


def _parse(body: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _at(value: Any, *path: str | int) -> Any:
    """What lies at a path through dictionaries and lists, or None."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks for, as a number or a date; None when it does not, or not understandably."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
