"""A judge at an OpenAI-compatible address: POST {base URL}/chat/completions.

`Endpoint` repeats a request after a failure that may pass: status 408, 425, 429 or 5xx, a time-out, a lost connection.
The pause grows from try to try, is longer if the server's header Retry-After asks for more, and never exceeds a limit.
Any other failure is final. Redirects are not followed. The key is added when a request is sent; no field, exception,
note or log holds it, and where the server's texts repeat it, kvbench removes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import tenacity

from kvbench.console.redact import HIDDEN, SHORTEST, redact_text
from kvbench.errors import quote
from kvbench.scoring.judge.api import MAX_TOKENS, JudgeError, KeyRefused, Reply, messages

BODY_LIMIT = 4 * 1024 * 1024  # bytes; a reply of 4096 tokens has about 20 kB
REFUSED = (401, 403)
PASSING = (408, 425, 429)  # failures that may pass, like every 5xx
SHOWN = 200  # characters of a server's text that a message quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A judge that is asked through a server's OpenAI-compatible address."""

    url: str  # base URL, with or without the final ``/chat/completions``
    model: str
    key_env: str  # environment variable with the key; if it is empty, no key is sent
    seconds: float = 120.0  # limit of one try, from the connection to the last byte
    tries: int = 5  # per request
    pause: float = 1.0  # seconds between the first two tries; they double up to `longest_pause`
    longest_pause: float = 60.0
    through_proxy: bool = True  # use the proxy of the environment (HTTPS_PROXY), if there is one

    def ask(self, system: str, user: str, images: Sequence[bytes] = (), max_tokens: int = MAX_TOKENS) -> Reply:
        request = {
            "model": self.model,
            "messages": messages(system, user, images),
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        growing = tenacity.wait_exponential(self.pause, self.longest_pause)

        def pause(state: tenacity.RetryCallState) -> float:
            failed = state.outcome and state.outcome.exception()
            asked_for = failed.retry_after if isinstance(failed, _TryAgain) else 0.0
            return min(max(growing(state), asked_for), self.longest_pause)

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TryAgain),
            stop=tenacity.stop_after_attempt(self.tries),
            wait=pause,
            sleep=time.sleep,
            reraise=True,
        )
        try:
            return tries(self._try, request)
        except _TryAgain as error:
            raise JudgeError(f"the judge gave no answer in {self.tries} tries; the last try failed: {error}") from None

    def _try(self, request: Mapping[str, Any]) -> Reply:
        """Send the request once. Raises JudgeError, KeyRefused, and _TryAgain for a failure that may pass."""
        try:
            status, headers, body = asyncio.run(self._post(request))
        except TimeoutError:
            raise _TryAgain(f"no response within {self.seconds:g} s") from None
        except (httpx.HTTPError, OSError) as error:  # their texts may quote the server
            raise _TryAgain(f"no connection ({type(error).__name__})") from None
        if status in PASSING or status >= 500:
            raise _TryAgain(f"HTTP status {status}", _retry_after(headers))
        return self._read(status, body)

    async def _post(self, request: Mapping[str, Any]) -> tuple[int, Mapping[str, str], str]:
        """Send the request and return the status, headers and body of the server's response. Uses asyncio, whose time
        limit covers connection, headers and body together."""
        address = f"{self.url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        headers = {"Accept-Encoding": "identity"}  # a compressed body could unpack to more than BODY_LIMIT
        async with (
            asyncio.timeout(self.seconds),
            httpx.AsyncClient(timeout=None, trust_env=self.through_proxy, headers=headers) as client,
            client.stream("POST", address, json=request, auth=self._sign, follow_redirects=False) as response,
        ):
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > BODY_LIMIT:
                    raise JudgeError(f"the judge's response has more than the limit of {BODY_LIMIT >> 20} MiB")
            return response.status_code, response.headers, self._hide(body.decode(errors="replace"))

    def _sign(self, request: httpx.Request) -> httpx.Request:
        if key := self._key():
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    def _key(self) -> str:
        return os.environ.get(self.key_env, "").strip()

    def _read(self, status: int, body: str) -> Reply:
        """Return the judge's reply in a server's response. Raises JudgeError if the response holds no reply, KeyRefused
        for a refused key."""
        if status in REFUSED:
            refused, empty = f"refused the key in {self.key_env}", f"needs a key, but {self.key_env} is empty"
            said = refused if self._key() else empty
            raise KeyRefused(
                f"the judge {said} (HTTP status {status}). Answers are saved; set a valid key, then "
                "'kvbench score RUN' scores them."
            )
        if 300 <= status < 400:
            raise JudgeError(
                f"the judge's address redirects (HTTP status {status}); redirects are not followed, so give "
                "--judge the final address"
            )
        parsed = _parse(body)
        if status != 200:
            said = self._clean(_at(parsed, "error", "message"))
            raise JudgeError(f"the judge answered with HTTP status {status}{said and f': {quote(said)}'}")
        text = _at(parsed, "choices", 0, "message", "content")
        if not isinstance(text, str):
            raise JudgeError("the judge's response is not a chat completion with a text")
        named = self._clean(_at(parsed, "model"))
        return Reply(text, f"{self.model} ({named})" if named and named != self.model else self.model)

    def _hide(self, text: str) -> str:
        """Return the server's text with the key hidden, in case the server repeats it. A key of fewer than `SHORTEST`
        characters is not hidden."""
        key = self._key()
        return text.replace(key, HIDDEN) if len(key) >= SHORTEST else text

    def _clean(self, said: object) -> str:
        """Return a value in the server's response as one short line without secrets; "" if the value is not a text."""
        return " ".join(redact_text(self._hide(said)).split())[:SHOWN] if isinstance(said, str) else ""


class _TryAgain(Exception):
    """A failed request that may succeed if it is repeated.

    retry_after: seconds that the server asks the client to wait.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


def _parse(body: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _at(value: Any, *path: str | int) -> Any:
    """Return the value at a path of keys and indices through parsed JSON; None if the path leads nowhere."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait by the header Retry-After (a number or a date); 0 if it is missing or malformed."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
