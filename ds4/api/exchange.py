"""One HTTP request's two ends: its body with limits, and the notice that its client went away.

Owns: the use of ASGI's receive and send for routes with a body. Runs in: front ends.
Source: the ASGI specification.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from ds4.api.dialects import refusal
from ds4.api.documents import document
from ds4.api.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    BusyError,
    ClientGoneError,
    DrainingError,
    failure,
)
from ds4.api.keys import ANYBODY, Tenant
from ds4.api.state import FrontState
from ds4.errors import RingFullError
from ds4.generation import GenerationRequest

# At 1 Mbit/s the largest default body takes as long; a client that sends a byte a second gives up its task.
BODY_TIMEOUT_S: Final = 300.0
_T = TypeVar("_T")


class Exchange:
    """Owned by the task that answers the request."""

    def __init__(self, state: FrontState, scope: Scope, receive: Receive, send: Send) -> None:
        self.state = state
        self.scope = scope
        self.send = send
        # Past all that only looks at the head of an answer: a stream sends a frame for each token.
        self.send_frame: Send = scope.get("ds4.send", send)
        self.arrived_s = time.monotonic()
        self.request_id: str = scope.get("ds4.request_id", "")
        self.cache_salt: bytes = scope.get("ds4.cache_salt", b"")
        self.tenant: Tenant = scope.get("ds4.tenant", ANYBODY)
        self.gone = False
        self._num_taken = 0  # sequences that count towards the tenant's limit
        self._tokens_taken = 0
        self._receive = receive
        self._on_gone: list[Callable[[], None]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._is_preparing = False

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLargeError before reading more than the limit, BodyTimeoutError,
        ClientGoneError.
        """
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_body()
        except TimeoutError:
            raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None

    async def _read_body(self) -> bytes:
        limit = self.state.settings.max_body_bytes
        too_large = BodyTooLargeError(f"the body is larger than {limit} bytes")
        for name, value in self.scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def prepare(self, work: Callable[[bytes], _T]) -> _T:
        """`work(body)`, with the worker told that a request is on its way. From here on the client's
        leaving is noticed. Raises what `work` raises, BusyError, DrainingError, ClientGoneError.
        """
        body = await self.body()
        if self.state.engine.draining:
            raise DrainingError("the server is shutting down")
        try:
            self.state.engine.check_room()  # before any work goes into what cannot run
        except RingFullError as error:
            raise BusyError(self.state.engine.turn_away()) from error
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._is_preparing = True
        self.state.engine.preparing(+1)
        result = await self.state.compute(len(body), lambda: work(body))
        await self.state.engine.wait_worker()
        if self.gone:
            raise ClientGoneError
        return result

    def take(self, num_sequences: int, num_tokens: int) -> None:
        """Count a request of so many sequences and prompt tokens, once. Raises KeyLimitError, RequestError."""
        if not self._num_taken:
            self.state.limits.take(self.tenant, num_sequences, num_tokens)
            self._num_taken, self._tokens_taken = num_sequences, num_tokens

    def untake(self) -> None:
        """The request never began: its prompt does not count."""
        if self._num_taken:
            self.state.limits.add_tokens(self.tenant, -self._tokens_taken)
            self._give_back()

    def _give_back(self) -> None:
        if self._num_taken:
            self.state.limits.give_back(self.tenant, self._num_taken)
            self._num_taken = 0

    def used(self, num_tokens: int) -> None:
        """Output was generated."""
        if self.tenant.tokens_per_minute:  # nothing for all others, so often
            self.state.limits.add_tokens(self.tenant, num_tokens)

    def of_tenant(self, request: GenerationRequest) -> GenerationRequest:
        """The same request, with whose it is."""
        if not self.tenant.number:
            return request
        return msgspec.structs.replace(request, tenant=self.tenant.number, weight=self.tenant.weight)

    def prepared(self) -> None:
        """The request reached the worker, or ended before. Idempotent."""
        if self._is_preparing:
            self._is_preparing = False
            self.state.engine.preparing(-1)

    def close(self) -> None:
        """The answer is out."""
        self.prepared()
        self._give_back()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for call in self._on_gone:
            call()

    def when_gone(self, call: Callable[[], None]) -> None:
        """Have `call` called once the client is gone; at once if it is."""
        self._on_gone.append(call)
        if self.gone:
            call()

    async def answer(self, work: Callable[[bytes], object]) -> None:
        """Answer 200 with `work(body)` as a document; for what needs no worker. Raises what `work` raises."""
        body = await self.body()
        response = await self.state.compute(len(body), lambda: document(work(body)))
        await response(self.scope, self._receive, self.send)

    async def reply(self, value: object) -> None:
        """Answer 200 with one JSON document."""
        await document(value)(self.scope, self._receive, self.send)


class Endpoint:
    """An ASGI route with a JSON body; every exception becomes the answer that the table gives it."""

    def __init__(self, state: FrontState, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._state = state
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        exchange = Exchange(self._state, scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGoneError:
            return
        except Exception as error:  # noqa: BLE001 - the request boundary
            told = failure(error, exchange.request_id)
            if told.reason:
                self._state.engine.metrics.add("ds4_requests_rejected_total", label=told.reason)
            await refusal(told, scope)(scope, receive, send)
        finally:
            exchange.close()
