"""`GET /health`, `/health/live`, `/health/ready`: open without a key.

Owns: these routes. Runs in: front ends. Source: llama-server for `/health`; the split into live and
ready is Kubernetes'. Live says that this process answers; ready that a new request would be served.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ds4.api.documents import document
from ds4.api.errors import DrainingError, failure
from ds4.api.state import FrontState
from ds4.errors import RingUnavailableError

# Longer than any step: a balancer should look elsewhere, but what is queued here may still be served.
WEDGED_S: Final = 60.0
# A running worker's process shows itself four times a second, also during a long step.
STOPPED_S: Final = 1.3


class Health:
    """The routes."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def live(self, request: Request) -> Response:
        """Answered whenever the process can."""
        return document({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A new request would be served; 503 with the reason otherwise."""
        engine = self._state.engine
        if engine.draining:
            return failure(DrainingError("the server is shutting down")).response()
        reason = engine.refusal
        if reason is None and engine.ring.worker_silent_s > WEDGED_S:
            reason = f"the worker has not answered for {engine.ring.worker_silent_s:.0f} s"
        if reason is None and engine.ring.worker_stopped_s > STOPPED_S:
            reason = f"the worker's process has not run for {engine.ring.worker_stopped_s:.1f} s"
        if reason is not None:
            return failure(RingUnavailableError(reason)).response()
        return document({"status": "ok"})
