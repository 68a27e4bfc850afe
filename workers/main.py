"""`ds4-worker`: the process that owns the device, the KV cache and the worker's end of the ring.

Owns start-up, signals and exit codes. Runs in the worker. The ring is made only when the model is
loaded, so front ends never see a worker that cannot serve.

Exit codes: 0 drained; 2 a setting, file or directory must be changed; 70 the device failed; 1 a
defect of ours. After the last two whoever started us should start us again, and front ends resume.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from ds4.config import Settings, load_settings
from ds4.errors import ConfigError, ModelFileError, RingError, RingTakenError
from ds4.generation import ModelInfo, encode_model_info
from ds4.grammar_library import GrammarError, GrammarVocabulary
from ds4.logs import setup_logging
from ds4.metrics import WORKER, Metrics
from ds4.model_file import ModelFile
from ds4.models import resolve_model
from ds4.pulse import Pulse, Stage, take_option
from ds4.ring.control import ControlPage
from ds4.ring.layout import RingShape
from ds4.ring.states import WorkerState
from ds4.ring.worker_end import WorkerRing
from ds4.shared_dir import prepare_shared_directory
from workers.devices.interface import PAGE_TOKENS, Device, DeviceFaultError, Limits
from workers.devices.kept_limits import keep_limits, open_with_kept_limits
from workers.devices.registry import open_device
from workers.engine import Engine, build_engine
from workers.sampling.grammar import Grammars
from workers.watchdog import Watchdog, end_process

log = logging.getLogger("workers.main")  # also where it runs as __main__

EXIT_OK: Final = 0
EXIT_DEFECT: Final = 1
EXIT_CONFIG: Final = 2
EXIT_DEVICE: Final = 70

_TAKE_OVER: Final = "--take-over"
_LEASE_S: Final = 2.0  # for the lease of a worker that was just killed to fall
_TAKE_OVER_S: Final = 60.0  # for a predecessor to leave the ring


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    try:
        pulse_fd, rest = take_option(list(sys.argv[1:] if argv is None else argv), "--pulse-fd")
        takes_over = rest[:1] == [_TAKE_OVER]
        settings = load_settings(rest[1:] if takes_over else rest)
        setup_logging(settings, "worker")
        return _serve(settings, Pulse(pulse_fd), takes_over)
    except (ConfigError, RingError) as error:
        print(f"ds4-worker: {error}", file=sys.stderr)  # noqa: T201 - the operator's one line
        return EXIT_CONFIG
    except DeviceFaultError as error:
        log.critical("ending after a device fault: %s", error)
        return EXIT_DEVICE
    except Exception:
        log.critical("ending after a defect", exc_info=True)
        return EXIT_DEFECT


def _serve(settings: Settings, pulse: Pulse, takes_over: bool) -> int:
    started_s = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to drain yet: any signal ends the process
    directory = prepare_shared_directory(settings)
    model = ModelFile.open(resolve_model(settings.model, progress=False))
    device, limits = open_with_kept_limits(open_device, settings, model, directory)
    try:
        return _run(settings, directory, model, device, limits, started_s, pulse, takes_over)
    finally:
        device.close()


def _run(
    settings: Settings,
    directory: Path,
    model: ModelFile,
    device: Device,
    limits: Limits,
    started_s: float,
    pulse: Pulse,
    takes_over: bool,
) -> int:
    num_kv_tokens = limits.num_pages * PAGE_TOKENS
    info = ModelInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_context_tokens=min(limits.max_context_tokens, num_kv_tokens),
        tokenizer_hash=model.tokenizer_hash,
        device=device.name,
        batched_sessions=settings.batched_sessions,
        num_pages=limits.num_pages,
        page_tokens=PAGE_TOKENS,
    )
    shape = RingShape(
        num_front_ends=settings.max_front_ends, slots_per_front_end=settings.slots_per_front_end
    )
    grammars = _grammars(model)
    ring = _take_ring(settings, directory, shape, encode_model_info(info), pulse, takes_over)
    keep_limits(settings, model, directory, limits)
    failed = True
    metrics: Metrics | None = None
    watchdog = Watchdog(ring, pulse, timeout_s=settings.worker_timeout_s, on_hang=end_process(EXIT_DEVICE))
    try:
        metrics = Metrics.open(directory, owner=WORKER)  # a predecessor writes the same words until it left
        engine = build_engine(
            settings,
            ring=ring,
            metrics=metrics,
            device=device,
            limits=limits,
            info=info,
            grammars=grammars,
            control=ControlPage(directory),
        )
        _handle_signals(engine, ring)
        watchdog.start()
        ring.set_state(WorkerState.READY)
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: never walk it again
        log.info(
            "serving",
            extra={
                "model": str(model.path),
                "device": info.device,
                "context_tokens": info.max_context_tokens,
                "kv_cache_tokens": num_kv_tokens,
                "sessions": settings.batched_sessions,
                "step_tokens": limits.max_rows,
                "after_s": round(time.monotonic() - started_s, 2),
            },
        )
        engine.run()
        failed = False
        log.info("handed over" if engine.handed_over else "drained")
        return EXIT_OK
    finally:
        watchdog.stop()
        ring.close(failed=failed)
        if metrics is not None:
            metrics.close()


def _take_ring(
    settings: Settings, directory: Path, shape: RingShape, info: bytes, pulse: Pulse, takes_over: bool
) -> WorkerRing:
    """The worker's end of the ring, as soon as a predecessor that was killed or asked to leave is gone."""
    deadline_s = time.monotonic() + (_TAKE_OVER_S if takes_over else _LEASE_S)
    while True:
        try:
            return WorkerRing(directory, shape, info, evict_after_s=settings.front_end_timeout_s)
        except RingTakenError:
            if time.monotonic() > deadline_s:
                raise
        if takes_over:
            pulse.beat(Stage.LOADED)
        time.sleep(0.01)


def _grammars(model: ModelFile) -> Grammars | None:
    """The model's vocabulary for structured output; None where it cannot be used, which is no reason to stop."""
    try:
        return Grammars(GrammarVocabulary.of_model(model))
    except (GrammarError, ModelFileError) as error:
        log.warning("there is no structured output: %s", error)
        return None


def _handle_signals(engine: Engine, ring: WorkerRing) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once; SIGUSR1 hands over."""
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)  # the next worker sweeps what this one leaves
        asked = True
        engine.request_drain()
        ring.wake()

    def on_hand_over(number: int, frame: FrameType | None) -> None:
        engine.request_hand_over()
        ring.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGUSR1, on_hand_over)


if __name__ == "__main__":
    sys.exit(main())
