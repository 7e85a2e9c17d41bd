"""The server: OpenAI's protocol over engines and picture pipelines, for ``specmm serve``.

Every error is answered by OpenAI's error object with a sentence. Requests are parsed in threads, so
that no stream waits for another's pictures; engines' events come back into the event loop, and the
rows of a client that hangs up are freed at once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from specmm.extending.registry import unknown
from specmm.loading.files import sentence_of
from specmm.serving.asking import Settings, Wanted, chat, completion
from specmm.serving.drawing import Painter
from specmm.serving.fields import Fields, Refused
from specmm.serving.forms import CHAT, COMPLETION, Form, Sums
from specmm.serving.measures import Measures
from specmm.serving.parsing import Parser, Parsing, Plain
from specmm.serving.requests import Asked, Busy, Ended, Engine, Piece, Tell, Ticket

LOGGER = logging.getLogger(__name__)
GONE = 499  # how servers' logs call a client that hung up
RETRY = {429: "1", 503: "10"}  # seconds after which to ask again
TYPES = dict.fromkeys((500, 503, 504), "server_error") | {429: "rate_limit_error"}
ASKED, DRAWN = "/v1/chat/completions", "/v1/images/generations"
DONE = "data: [DONE]\n\n"
Answer = Callable[[Request], Awaitable[Response]]
Told = tuple[int, Piece | Ended]


def app_of(
    engines: Sequence[Engine], settings: Settings, painters: Sequence[Painter] = ()
) -> FastAPI:
    """The application that serves ``engines`` and ``painters`` by their names. Its ``state.api`` is
    the :class:`Api`, which ends it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    api = app.state.api = Api(engines, settings, painters)
    for path, method, answer in (
        (ASKED, "POST", api.chat),
        ("/v1/completions", "POST", api.completion),
        (DRAWN, "POST", api.draw),
        ("/v1/models", "GET", api.models),
        ("/v1/models/{name:path}", "GET", api.model),
        ("/health", "GET", api.health),
        ("/metrics", "GET", api.metrics),
    ):
        app.add_route(path, api.guarded(answer), [method])

    async def nowhere(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = f"{request.method} {request.url.path[:200]}"
        why = f"there is no {what} here; GET /v1/models lists the models"
        return api.refusal(request, Refused(why, status=status, code="not_found"))

    app.add_exception_handler(HTTPException, nowhere)
    return app


class Api:
    """The handlers of the protocol's paths. While ``draining`` they take no new requests."""

    def __init__(
        self, engines: Sequence[Engine], settings: Settings, painters: Sequence[Painter] = ()
    ) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.parsings = {engine.name: Parsing.of(engine.pipe, engine.ends) for engine in engines}
        self.painters = {painter.name: painter for painter in painters}
        self.settings = settings
        self.measures = Measures(engines)
        self.started = int(time.time())
        self.draining = False
        self.drawing = asyncio.Lock()  # pictures are drawn one request at a time
        self.waiting = 0  # requests for pictures

    async def close(self, seconds: float) -> None:
        """Take no more requests, and give running ones ``seconds`` to end."""
        self.draining = True
        ends = [run_in_threadpool(engine.close, seconds) for engine in self.engines.values()]
        await asyncio.gather(*ends, self._drawn(seconds))

    async def _drawn(self, seconds: float) -> None:
        """Wait up to ``seconds`` for pictures that are being drawn, then stop their painters."""
        end = time.monotonic() + seconds
        while self.waiting and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for painter in self.painters.values():
            painter.stopped = True

    # ---- any request

    def guarded(self, answer: Answer) -> Answer:
        """The handler ``answer`` behind the key's check, its errors as OpenAI's."""

        async def endpoint(request: Request) -> Response:
            try:
                self._check(request)
                response = await answer(request)
            except ClientDisconnect:
                response = Response(status_code=GONE)
            except Exception as error:
                return self.refusal(request, error)
            self.measures.answered(request.url.path, response.status_code)
            return response

        return endpoint

    def _check(self, request: Request) -> None:
        """Refuse requests without the key, and all requests while the server ends."""
        if not request.url.path.startswith("/v1/"):
            return
        key = self.settings.api_key.encode()
        said = request.headers.get("authorization", "").encode("latin-1")
        if key and not hmac.compare_digest(said, b"Bearer " + key):
            why = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            raise Refused(why, status=401, code="invalid_api_key")
        if self.draining:
            raise Refused("the server is about to end; ask again later", status=503)

    def refusal(self, request: Request, error: Exception) -> Response:
        """The answer to a request that fails with an ``error``."""
        body, status = self._told(error, request)
        self.measures.answered(request.url.path, status)
        again = {"Retry-After": RETRY[status]} if status in RETRY else {}
        return _json(body, status, again)

    def _told(self, error: Exception, request: Request) -> tuple[dict[str, Any], int]:
        """The client's error object for an ``error`` and the status; our own faults are logged."""
        body, status = _error(error)
        if status == 500:
            LOGGER.error("%s failed: %s", request.url.path, sentence_of(error))
            LOGGER.debug("the traceback", exc_info=error)
        return body, status

    async def _fields(self, request: Request) -> Fields:
        """The fields of a request's JSON."""
        most = self.settings.max_bytes
        if "json" not in request.headers.get("content-type", ""):
            raise Refused("the request must have Content-Type: application/json")
        said = request.headers.get("content-length", "0")
        too_much = Refused(f"a request may have {most:,} bytes, got more", status=413)
        if said.isdecimal() and int(said[:20]) > most:
            raise too_much
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise too_much
        return Fields(await run_in_threadpool(_parsed, bytes(body)))

    # ---- texts

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._texts(request, CHAT, chat)

    async def completion(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._texts(request, COMPLETION, completion)

    async def _texts(self, request: Request, form: Form, read: Any) -> Response:
        start = time.perf_counter()
        fields = await self._fields(request)
        engine = _named(self.engines, fields, self.painters, DRAWN)
        own = self.settings.sampling.get(engine.name, {})
        parsing = self.parsings[engine.name] if form is CHAT else None
        wanted = await run_in_threadpool(read, fields, self.settings, own, parsing)
        answers = Answers(request, wanted, parsing, self.measures.timed(engine.name, start))
        await answers.begin(engine)
        head = form.head(engine.name, wanted.stream)
        sums = Sums(form, wanted, answers.parsers)
        if wanted.stream:
            events = self._streamed(answers, sums, head)
            return StreamingResponse(events, media_type="text/event-stream")
        async for number, event in answers:
            self._raise_failure(event)
            sums.add(number, event)
        return Response(status_code=GONE) if answers.gone else _json(sums.whole(head))

    async def _streamed(
        self, answers: Answers, sums: Sums, head: dict[str, Any]
    ) -> AsyncIterator[str]:
        """The events of a stream."""
        for first in sums.first:
            yield _event(head | {"choices": [first]} | sums.unknown_usage)
        try:
            async for number, event in answers:
                self._raise_failure(event)
                for choice in sums.add(number, event):
                    own = {"specmm": sums.own} if choice["finish_reason"] and sums.done else {}
                    yield _event(head | {"choices": [choice]} | sums.unknown_usage | own)
        except Exception as error:
            yield _event(self._told(error, answers.request)[0])
            return
        if answers.gone:
            return
        if answers.wanted.usage:
            yield _event(head | {"choices": [], "usage": sums.usage})
        yield DONE

    def _raise_failure(self, event: Piece | Ended) -> None:
        """Raise the refusal for an answer that ended with an error."""
        if isinstance(event, Ended) and event.reason in ("error", "cancelled", "timeout"):
            status = 504 if event.reason == "timeout" else 503 if self.draining else 500
            raise Refused(event.error or "the answer was cancelled", status=status)

    # ---- pictures

    async def draw(self, request: Request) -> Response:
        """``/v1/images/generations``; one request is drawn at a time."""
        fields = await self._fields(request)
        painter = _named(self.painters, fields, self.engines, ASKED)
        draw = painter.wanted(fields, self.settings.max_answers)
        if self.waiting >= self.settings.max_waiting:
            raise Busy(f"{self.waiting} requests for pictures wait, as many as may")
        self.waiting += 1
        gone = asyncio.create_task(_gone(request))
        try:
            async with self.drawing:
                if gone.done():
                    return Response(status_code=GONE)
                return _json(await run_in_threadpool(draw, gone.done))
        finally:
            gone.cancel()
            self.waiting -= 1

    # ---- what there is

    async def models(self, _: Request) -> Response:
        """``/v1/models``."""
        names = dict.fromkeys([*self.engines, *self.painters])
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        if name not in self.engines and name not in self.painters:
            raise _unknown(name, [*self.engines, *self.painters])
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "specmm"}

    async def health(self, _: Request) -> Response:
        """``/health``: 200, and 503 while the server ends or one of its models cannot go on."""
        if self.draining:
            raise Refused("the server is about to end", status=503)
        if ended := [name for name, engine in self.engines.items() if engine.ended]:
            why = f"{ended[0]} is not answered any more; the log says why, start the server again"
            raise Refused(why, status=503)
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """``/metrics``, as Prometheus reads them."""
        kind, text = self.measures.page()
        return Response(text, headers={"Content-Type": kind})


class Answers:
    """An engine's events about a request's answers, in this event loop; once the client has
    ``gone``, their rows are freed.
    """

    def __init__(
        self,
        request: Request,
        wanted: Wanted,
        parsing: Parsing | None,
        seen: Callable[[int, Any], None],
    ) -> None:
        self.request = request
        self.wanted = wanted
        self.parsing = parsing
        self.parsers: list[Plain | Parser] = []
        self.seen = seen
        self.gone = False
        self.told: asyncio.Queue[Told | None] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.watch: asyncio.Task[None] | None = None

    async def begin(self, engine: Engine) -> None:
        """Submit all answers, or none: raises what the ``engine`` raises."""
        loop = asyncio.get_running_loop()

        def tell(number: int, event: Piece | Ended) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self.told.put_nowait, (number, event))

        try:
            for number, asked in enumerate(self.wanted.asked):
                await run_in_threadpool(self._submit, engine, asked, partial(tell, number))
        except BaseException:
            self.cancel()
            raise
        self.watch = asyncio.create_task(self._watched())

    def _submit(self, engine: Engine, asked: Asked, tell: Tell) -> None:
        kind = getattr(asked.options.get("grammar"), "kind", None)
        if self.parsing is None or kind == "json_schema":
            self.tickets.append(engine.submit(asked, tell))
            self.parsers.append(Plain())
            return
        tools = asked.more.get("tools", ())
        ticket = engine.submit(replace(asked, marks=self.parsing.marks(tools)), tell)
        self.tickets.append(ticket)
        begun = ticket.ids if kind != "structural_tag" else ()  # a call, whatever the prompt opens
        self.parsers.append(self.parsing.parser(begun, tools))

    async def _watched(self) -> None:
        await _gone(self.request)
        self.gone = True
        self.cancel()
        self.told.put_nowait(None)

    def cancel(self) -> None:
        """Free the rows of all answers that have not ended."""
        for ticket in self.tickets:
            ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[Told]:
        """Events with their answers' numbers, until all have ended or the client has gone."""
        left = len(self.tickets)
        try:
            while left and (found := await self.told.get()) is not None:
                self.seen(*found)
                left -= isinstance(found[1], Ended)
                yield found
        finally:
            assert self.watch is not None
            self.watch.cancel()
            if left:
                self.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client of a ``request``, which has been read, hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _named(
    here: Mapping[str, Any], fields: Fields, others: Mapping[str, Any], elsewhere: str
) -> Any:
    """The entry of ``here`` that a request names, or the only one if it names none."""
    name = fields.text("model") or (next(iter(here)) if len(here) == 1 else "")
    if name in here:
        return here[name]
    if name in others:
        why = f"the model {name} is asked at {elsewhere}"
        raise Refused(why, "model", 404, "model_not_found")
    raise _unknown(name, list(here))


def _unknown(name: str, known: Sequence[str]) -> Refused:
    why = str(unknown("model", name, known))
    return Refused(why, "model", 404, "model_not_found")


def _parsed(body: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request must be JSON, got: {sentence_of(error)}") from error


def _error(error: Exception) -> tuple[dict[str, Any], int]:
    """OpenAI's error object, and the status."""
    why, param, status, code = sentence_of(error), None, 500, None
    if isinstance(error, Refused):
        param, status, code = error.param, error.status, error.code
    elif isinstance(error, Busy):
        why, status, code = str(error) or "the server is busy; ask again later", 429, "busy"
    elif isinstance(error, ValueError):
        status = 400
    else:
        why = f"the server failed ({type(error).__name__}), its log says more"
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": why, "type": kind, "param": param, "code": code}}, status


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``body`` in ASCII: errors quote what a client sent, which may hold halves of letters."""
    return Response(json.dumps(body), status, headers, "application/json")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
