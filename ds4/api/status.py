"""`GET /metrics`, `/slots`, `/props`, `/version`: what goes on, and the settings in force.

Owns: these routes. Runs in: front ends. Source: Prometheus' text format; llama-server's routes of
the same names. Every front end gives the same answer, since all of it is in shared memory; prompts
and keys are in none of it.
"""

from starlette.requests import Request
from starlette.responses import Response

from ds4 import __version__, config
from ds4.api.documents import document
from ds4.api.state import FrontState
from ds4.metrics import CONTENT_TYPE
from ds4.protocol.server_status import DefaultSettings, Props, Slots, SlotView, Version, worker_props
from ds4.ring.states import SlotState


class Status:
    """The routes."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def metrics(self, request: Request) -> Response:
        """All counters as text."""
        engine = self._state.engine
        slots = engine.ring.slots()
        text = engine.metrics.exposition(
            {
                "ds4_decode_pending": engine.ring.num_pending(),
                "ds4_slots": len(slots),
                "ds4_slots_used": sum(slot.state != SlotState.FREE for slot in slots),
                "ds4_worker_ready": int(engine.ready),
            }
        )
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def slots(self, request: Request) -> Response:
        """The state of every slot of the ring, and the pending count."""
        engine = self._state.engine
        slots = [
            SlotView(
                id=slot.slot,
                front_end=slot.front_end,
                state=slot.state.name.lower(),
                is_processing=slot.state != SlotState.FREE,
                n_prompt_tokens=slot.num_prompt_tokens,
                n_cached_tokens=slot.num_cached_tokens,
                n_decoded=slot.num_generated_tokens,
            )
            for slot in engine.ring.slots()
        ]
        pending, running = engine.ring.num_pending(), engine.ring.num_running
        return document(Slots(decode_pending=pending, num_running=running, slots=slots))

    async def props(self, request: Request) -> Response:
        """The settings in force, secrets left out, and the model."""
        state = self._state
        info = state.engine.model_info
        tokenizer = state.model.tokenizer
        props = Props(
            model_alias=state.model.names[0],
            model_path=state.model.file.path.name,
            n_ctx=state.max_context_tokens,
            total_slots=len(state.engine.ring.slots()),
            chat_template=state.model.file.chat_template or "",
            bos_token="" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            eos_token="" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
            build_info=f"ds4-server {__version__}",
            default_generation_settings=DefaultSettings(
                n_ctx=state.max_context_tokens, params=state.model.defaults
            ),
            settings={
                setting.name: getattr(state.settings, setting.name)
                for setting in config.TABLE
                if not setting.secret and setting.name != "api_key_file"
            },
            worker=worker_props(info) if info is not None else None,
        )
        return document(props)

    async def version(self, request: Request) -> Response:
        """What runs here."""
        return document(Version(version=__version__))
