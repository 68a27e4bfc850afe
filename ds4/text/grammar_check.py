"""The checking process: compiles grammars of strangers, so that nothing worse than itself can end.

Owns: itself. Runs in: a child of a front end, `python -m ds4.text.grammar_check MODEL`. Some schemas of
a few lines take years to compile or fill any memory, and a thread cannot be stopped; this process is
ended by its own alarm or memory limit, and the front end starts another.

Frames on standard input and output: u32 length, little-endian, then msgpack. It sends one when it is
ready, then one for each source it reads.
"""

import contextlib
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ds4.errors import ConfigError, RequestError
from ds4.generation import MAX_GRAMMAR_BYTES
from ds4.grammar_library import GrammarError, GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.grammar import MAX_CHECK_CPU_S, MAX_CHECK_S, GrammarSource, Verdict, grammar_of

# Of the first mask, which is among the slowest: it would be added to a step of everybody.
_MAX_MASK_S: Final = 0.05
_MASK_TRIES: Final = 3  # a busy neighbour slows one, the grammar slows all
_MAX_MEMORY_BYTES: Final = 1 << 30  # more than what the process has when it is ready
_LENGTH: Final = struct.Struct("<I")


def check(source: GrammarSource, vocabulary: GrammarVocabulary) -> Verdict:
    """Translate and compile; takes any time and memory."""
    try:
        grammar = grammar_of(source)
    except RequestError as error:
        return Verdict(problem=f"cannot be used: {error}", code=error.code or "invalid_grammar")
    except RecursionError:
        return Verdict(problem="is nested too deeply", code="grammar_too_complex")
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        return Verdict(problem=f"is larger than {MAX_GRAMMAR_BYTES} bytes", code="grammar_too_large")
    try:
        matcher = vocabulary.compile(grammar)
    except GrammarError as error:
        return _refusal(str(error))
    if min(_seconds(matcher.deep_copy().compute_bitmask) for _ in range(_MASK_TRIES)) > _MAX_MASK_S:
        return Verdict(problem="is too complex: it would slow down every token", code="grammar_too_complex")
    return Verdict(grammar=grammar)


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def _refusal(reason: str) -> Verdict:
    """Says first what most clients need to know: which keyword of their schema is not supported."""
    _, found, keys = reason.partition("Unimplemented keys: [")
    if found:
        return Verdict(
            problem=f"uses JSON schema keywords that are not supported: {keys.partition(']')[0]}",
            code="unsupported_parameter",
        )
    return Verdict(problem=f"cannot be used: {reason}", code="invalid_grammar")


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        status = Path("/proc/self/status").read_text()
        now = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + _MAX_MEMORY_BYTES, hard))


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    return stream.read(length)


def _write(stream: BinaryIO, verdict: Verdict) -> None:
    raw = msgspec.msgpack.encode(verdict)
    stream.write(_LENGTH.pack(len(raw)) + raw)
    stream.flush()


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the front end decides
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        vocabulary = GrammarVocabulary.of_model(ModelFile.open(Path(sys.argv[1])))
    except (GrammarError, ConfigError) as error:
        _write(answers, Verdict(problem=str(error)))
        return 0
    _limit_memory()
    _write(answers, Verdict())
    decoder = msgspec.msgpack.Decoder(GrammarSource)
    while (raw := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CHECK_CPU_S)  # their default action ends the process
        signal.setitimer(signal.ITIMER_REAL, MAX_CHECK_S)
        verdict = check(decoder.decode(raw), vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
