"""An OpenAI-compatible endpoint: one streamed chat completion at a time, with its times."""

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from agentserve.client.http import CONNECT_TIMEOUT_S, connection_options
from agentserve.client.sse import SSEParser

PATH = "chat/completions"
READ_TIMEOUT_S = 600.0
QUOTED = 300  # characters of an endpoint's own words
MAX_TOKENS = "{max_tokens}"  # in `extra`: this turn's number
_TOO_LONG = ("context", "too long", "maximum", "exceed")


class EndpointError(Exception):
    """The endpoint refused or failed a request; the message says what to do about it."""


class Answer(msgspec.Struct, frozen=True):
    """One answer as the client saw it; token counts are the endpoint's, None: not reported."""

    ttft_s: float  # request sent to first text, reasoning or call
    latency_s: float  # request sent to end of the stream
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None

    def has_output(self) -> bool:
        parts = (self.content, self.reasoning_content, self.reasoning, self.refusal)
        return any(parts) or bool(self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Endpoint:
    """A connection to `url`, such as http://host/v1; for use in one event loop.

    extra: fields of every request beside or instead of ours; null leaves one out, and the string
    "{max_tokens}" stands for the turn's number

    Raises ValueError when `url` is no HTTP address.
    """

    def __init__(
        self, url: str, api_key: str | None, model: str | None, extra: dict[str, Any]
    ) -> None:
        self.url = url.rstrip("/").removesuffix(f"/{PATH}")
        self.model = model
        self._extra = extra
        options = connection_options(f"{self.url}/", api_key, READ_TIMEOUT_S)
        self._http = httpx.AsyncClient(**options, limits=httpx.Limits(max_connections=None))

    @property
    def address(self) -> str:
        """The URL without a password that may be in it."""
        return str(httpx.URL(self.url).copy_with(userinfo=b""))

    async def choose_model(self) -> None:
        """Take the first model that the endpoint lists, where none is named.

        Raises EndpointError.
        """
        if self.model is None:
            self.model = await self._first_model()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> Answer:
        """Generate one answer and return what it took; what it says is passed over.

        Raises EndpointError.
        """
        body = msgspec.json.encode(self._body(messages, tools, max_tokens))
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", PATH, content=body, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise EndpointError(refusal(response.status_code, response.text, self.address))
                kind = response.headers.get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    raise EndpointError(
                        f"the answer is {kind or 'of no type'}, not an event stream"
                    )
                return await _timed(response.aiter_bytes(), started)
        except httpx.HTTPError as error:
            raise EndpointError(self._lost(error)) from None

    def _body(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tools:
            body["tools"] = tools
        body |= {
            name: max_tokens if value == MAX_TOKENS else value
            for name, value in self._extra.items()
        }
        return {name: value for name, value in body.items() if value is not None}

    async def _first_model(self) -> str:
        try:
            response = await self._http.get("models")
        except httpx.HTTPError as error:
            raise EndpointError(self._lost(error)) from None
        if response.status_code in (401, 403):
            raise EndpointError(refusal(response.status_code, response.text, self.address))
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            raise EndpointError(
                f"{self.address}/models names no model (status {response.status_code}): is the "
                "address right (it usually ends in /v1)? If so, name the model with --model"
            ) from None

    def _lost(self, error: httpx.HTTPError) -> str:
        what = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"no answer from {self.address} within {CONNECT_TIMEOUT_S:g} s ({what})"
        return f"{self.address} broke off ({what})"


async def _timed(chunks: AsyncIterator[bytes], started: float) -> Answer:
    """Read a stream to its end. Raises EndpointError when it has an error or ends too early."""
    parser = SSEParser()
    first: float | None = None
    usage = _Usage()
    ended = False
    async for piece in chunks:
        for message in parser.feed(piece):
            if message.data.strip() == b"[DONE]":
                ended = True
                continue
            chunk = _decode(message.data)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ended = ended or choice.finish_reason is not None
                if first is None and choice.delta is not None and choice.delta.has_output():
                    first = time.perf_counter() - started
    if not ended:
        raise EndpointError("the stream ended before its answer did")
    latency = time.perf_counter() - started
    details = usage.prompt_tokens_details or _Details()
    return Answer(
        ttft_s=latency if first is None else first,
        latency_s=latency,
        input_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _decode(data: bytes) -> _Chunk:
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EndpointError(f"a line of the stream cannot be read: {error}") from None
    if chunk.error is not None:
        raise EndpointError(f"it failed in the stream: {_words(chunk.error)}")
    return chunk


def refusal(status: int, text: str, url: str) -> str:
    """Return what the endpoint said to a request that it did not take, and what to do."""
    said = f"{url} answers {status}: {_body_words(text)}"
    return f"{said}; {hint}" if (hint := _hint(status, text.lower())) else said


def _hint(status: int, text: str) -> str:
    if status in (401, 403):
        return "give the key with --api-key"
    if status == 404:
        if "model" in text:
            return "name a model that it serves with --model"
        return f"is there a /{PATH} under this address? It usually ends in /v1"
    if status == 413 or (status in (400, 422) and any(word in text for word in _TOO_LONG)):
        return (
            "if the history has outgrown its context: serve it with a larger one, or replay "
            "fewer turns with --turns"
        )
    if status in (400, 422):
        return "--extra '{\"FIELD\": null}' leaves a field out that it does not take"
    if status in (429, 503):
        return "it is overloaded or not ready: wait, or replay fewer sessions"
    return ""


def _body_words(text: str) -> str:
    try:
        body = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return _words(text)
    if isinstance(body, dict):
        for name in ("error", "message", "detail"):
            if body.get(name):
                return _words(body[name])
    return _words(body)


def _words(value: Any) -> str:
    """Return an error of any shape in one bounded line."""
    if isinstance(value, dict):
        value = value.get("message") or value
    line = " ".join(str(value).split()) or "nothing"
    return line if len(line) <= QUOTED else f"{line[:QUOTED]}..."
