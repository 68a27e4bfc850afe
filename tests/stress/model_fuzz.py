"""Model files from hell: a good file, changed with knowledge of what its parts mean, is loaded and run.

    python -m tests.stress.model_fuzz --seconds 600 --seed 1        (every case is a function of its number)

Whatever comes of it is a model that works or a ConfigError (ModelFileError is one), in bounded time and
memory. Each case goes all the way: reader, vocabulary, chat template, grammar vocabulary, program, device,
a few steps. Cases run in a child process, so that a crash of it is a finding and not the end.
"""

import argparse
import contextlib
import logging
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError, RequestError
from ds4.grammar_library import GrammarError, GrammarVocabulary
from ds4.model_file import ModelFile
from ds4.text.chat_template import ChatTemplate
from ds4.text.tokenizer import Tokenizer
from tests.support.device_driver import DeviceDriver
from tests.support.gguf_pieces import (
    ARRAY,
    FIXED_BYTES,
    FLOAT32,
    STRING,
    UINT32,
    Pieces,
    cut,
    gguf_bytes,
    pair,
    tensor,
    text,
)
from tests.support.tiny_model import TinyShape, write_tiny_model
from workers.devices.registry import open_device

CASE_S: Final = 30  # of one case on the processor; a good file takes a tenth of a second
HANG_S: Final = 600  # of one case by the clock: it sleeps for ever
MAX_GROWTH_BYTES: Final = 2 << 30  # of memory, over all cases: a template may make values of 64 Mi characters
WHOLE: Final = (0, 1, 2, 3, 5, 7, 31, 33, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LONG: Final = (*WHOLE, 1 << 32, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS: Final = (0.0, -0.0, -1.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
TEMPLATES: Final = (
    "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true') }}",
    "{% set x = namespace(v='a') %}{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}",
    "{{ messages | tojson(indent=1000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ (messages * 100000000) | length }}",
    "{% include 'x' %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 100000 + "1 }}",
    "{% if 1 %}" * 2000,
    "{{ lipsum(n=100000) }}",
    "{{ range(10**18) | list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '" + "a" * 100000 + "' | replace('a', 'b' * 100000) }}",
)
TEXTS: Final = ("", "\0", "gpt2", "llama", "x" * 70000, "\U0010ffff", "<|im_start|>", "a b", " ", "Ġ", "{{")


class Outcome(msgspec.Struct):
    """What came of the cases. `faults` is empty when every one ended as it may."""

    cases: int
    worked: int
    refused: int
    faults: list[str]


# -- changes


def _value(rng: random.Random) -> tuple[int, bytes]:
    """Any value of any type."""
    value_type = rng.choice((*FIXED_BYTES, STRING, ARRAY, ARRAY, 13))
    if value_type == STRING:
        return STRING, text(rng.choice((*TEXTS, *TEMPLATES)))
    if value_type == ARRAY:
        item_type = rng.choice((*FIXED_BYTES, STRING, ARRAY))
        length = rng.choice((0, 1, 3, 300, 1 << 20, rng.choice(LONG)))
        return ARRAY, struct.pack("<IQ", item_type, length) + rng.randbytes(rng.choice((0, 8, 4096)))
    return value_type, rng.choice((rng.randbytes(8), bytes(8), b"\xff" * 8))[: FIXED_BYTES.get(value_type, 8)]


def _set_number(rng: random.Random, pieces: Pieces) -> None:
    """A hyper-parameter or an id becomes an awkward one, of its own type."""
    keys = [key for key, (kind, _) in pieces.pairs.items() if kind in (UINT32, FLOAT32)]
    if not keys:
        return
    key = rng.choice(keys)
    kind = pieces.pairs[key][0]
    pieces.pairs[key] = (
        kind,
        (struct.pack("<I", rng.choice(WHOLE)) if kind == UINT32 else struct.pack("<f", rng.choice(FLOATS))),
    )


def _set_value(rng: random.Random, pieces: Pieces) -> None:
    """A key gets any value at all."""
    pieces.pairs[rng.choice(list(pieces.pairs))] = _value(rng)


def _add_key(rng: random.Random, pieces: Pieces) -> None:
    """A key that the file had not, and that somebody reads."""
    whole = struct.pack("<I", rng.choice(WHOLE))
    real = struct.pack("<f", rng.choice(FLOATS))
    key, value = rng.choice(
        (
            ("general.alignment", (UINT32, whole)),
            ("split.count", (UINT32, whole)),
            ("llama.expert_count", (UINT32, whole)),
            ("llama.rope.scaling.type", (STRING, text(rng.choice(("none", "linear", "yarn", "x"))))),
            ("llama.rope.scaling.factor", (FLOAT32, real)),
            ("llama.rope.scaling.original_context_length", (UINT32, whole)),
            ("llama.rope.scaling.yarn_ext_factor", (FLOAT32, real)),
            ("llama.rope.scaling.yarn_beta_fast", (FLOAT32, real)),
            ("llama.rope.scaling.attn_factor", (FLOAT32, real)),
            ("tokenizer.ggml.eot_token_id", (UINT32, whole)),
            ("tokenizer.ggml.unknown_token_id", (UINT32, whole)),
            ("tokenizer.ggml.add_bos_token", (7, rng.choice((b"\0", b"\1", b"\2")))),
            ("tokenizer.ggml.eos_token_ids", (ARRAY, struct.pack("<IQI", UINT32, 1, rng.choice(WHOLE)))),
            ("tokenizer.chat_template.tool_use", (STRING, text(rng.choice(TEMPLATES)))),
        )
    )
    pieces.pairs[key] = value


def _drop_key(rng: random.Random, pieces: Pieces) -> None:
    del pieces.pairs[rng.choice(list(pieces.pairs))]


def _set_template(rng: random.Random, pieces: Pieces) -> None:
    pieces.pairs["tokenizer.chat_template"] = STRING, text(rng.choice(TEMPLATES))


def _change_vocabulary(rng: random.Random, pieces: Pieces) -> None:
    """Tokens, types or merges: longer, shorter, repeated, nonsense."""
    # Those that no other change has made nonsense of.
    arrays = [
        key for key, value in pieces.pairs.items() if value[0] == ARRAY and value == pieces.sound.get(key)
    ]
    if not arrays:
        return
    key = rng.choice(arrays)
    raw = pieces.pairs[key][1]
    item_type, length = struct.unpack_from("<IQ", raw)
    if item_type != STRING:
        fresh = rng.randbytes(len(raw) - 12) if rng.random() < 0.5 else raw[12:-4]
        length -= len(raw[12:]) // 4 - len(fresh) // 4
        pieces.pairs[key] = ARRAY, struct.pack("<IQ", item_type, max(0, length)) + fresh
        return
    items = []
    position = 12
    for _ in range(length):
        (size,) = struct.unpack_from("<Q", raw, position)
        items.append(raw[position + 8 : position + 8 + size])
        position += 8 + size
    for _ in range(rng.choice((1, 3, 50))):
        index = rng.randrange(len(items)) if items else 0
        wrong = rng.choice((b"", b"\xff\xfe", rng.choice(TEXTS).encode(), items[index] * 2 if items else b""))
        rng.choice(
            (
                lambda index=index, wrong=wrong: items.insert(index, wrong),
                lambda index=index, wrong=wrong: items.__setitem__(slice(index, index + 1), [wrong]),
                lambda index=index: items.__delitem__(slice(index, index + 1)),
            )
        )()
    body = b"".join(struct.pack("<Q", len(item)) + item for item in items)
    pieces.pairs[key] = ARRAY, struct.pack("<IQ", STRING, len(items)) + body


def _change_tensor(rng: random.Random, pieces: Pieces) -> None:
    """Shape, type, place or name of one."""
    if not pieces.tensors:
        return
    one, other = rng.choice(pieces.tensors), rng.choice(pieces.tensors)
    what = rng.randrange(7)
    if what == 0:
        one.sizes = [rng.choice((*LONG, 32, 64, 128)) for _ in range(rng.choice((0, 1, 2, 2, 3, 4, 5)))]
    elif what == 1:
        one.sizes[rng.randrange(len(one.sizes)) if one.sizes else 0 :] = [rng.choice(LONG)]
    elif what == 2:
        one.ggml_type = rng.choice((*range(42), 1 << 31))
    elif what == 3:
        one.offset = rng.choice((*LONG, other.offset, one.offset + 32, -32 % (1 << 64)))
    elif what == 4:
        one.name = rng.choice((other.name, "", "x", "rope_freqs.weight", "blk.4095.attn_q.weight"))
    elif what == 5:
        pieces.tensors.remove(one)
    else:
        one.sizes, other.sizes = other.sizes, one.sizes


def _change_weights(rng: random.Random, pieces: Pieces) -> None:
    """NaN, infinities, noise: a model that computes nonsense."""
    data = bytearray(pieces.data)
    for _ in range(rng.choice((1, 100))):
        at = rng.randrange(len(data) or 1)
        data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\x80\x7f", rng.randbytes(4)))
    pieces.data = bytes(data)


CHANGES: Final[tuple[Callable[[random.Random, Pieces], None], ...]] = (
    _set_number,
    _set_number,
    _set_value,
    _add_key,
    _drop_key,
    _set_template,
    _change_vocabulary,
    _change_vocabulary,
    _change_tensor,
    _change_tensor,
    _change_weights,
)


def case(base: bytes, number: int) -> bytes:
    """The file of one case."""
    rng = random.Random(number)
    pieces = cut(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(CHANGES)(rng, pieces)
    pairs = [pair(key, *value) for key, value in pieces.pairs.items()]
    tensors = [tensor(one.name, one.sizes, one.ggml_type, one.offset) for one in pieces.tensors]
    counts: dict[str, int] = {}
    if rng.random() < 0.05:
        counts[rng.choice(("num_pairs", "num_tensors"))] = rng.choice((*LONG, len(pairs) + 1, len(pairs) - 1))
    content = bytearray(gguf_bytes(pairs, tensors, data=pieces.data, **counts))  # type: ignore[arg-type]
    if rng.random() < 0.2:
        at = rng.randrange(min(len(content), 12000))
        content[at : at + 8] = rng.choice((rng.randbytes(8), rng.choice(LONG).to_bytes(8, "little")))
    if rng.random() < 0.05:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


# -- running them


def try_file(path: Path, device_name: str) -> bool:
    """Load the file and run it. False where it was refused with a ConfigError."""
    settings = Settings(
        model=str(path), device=device_name, kv_cache_tokens=2048, batched_sessions=1, threads=1
    )
    try:
        model = ModelFile.open(path)
        tokenizer = Tokenizer.from_model(model)
        template = ChatTemplate.from_model(model, tokenizer)
        ids = [1, 2, 3]
        with contextlib.suppress(RequestError):
            ids = tokenizer.encode_rendered(template.render([{"role": "user", "content": "Hello, world!"}]))
        with contextlib.suppress(GrammarError):
            GrammarVocabulary.of_model(model).compile("start: /[a-z]+/")
        device, limits = open_device(settings, model)
    except ConfigError:
        return False
    try:
        prompt = [token_id % model.vocab_size for token_id in ids[:16]] or [0]
        if limits.max_context_tokens > 3:
            DeviceDriver(device, limits).generate([prompt[: limits.max_context_tokens - 3]], 3)
    finally:
        device.close()
    return True


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _child(base: bytes, cases: range, until_s: float, device: str, path: Path, out: int) -> None:
    """These cases, one line each to `out`, until it is time."""
    logging.disable()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "overflow|invalid value", RuntimeWarning)  # weights may be anything
    try_file(path, device)  # compiles and imports; `path` holds the good file
    most = _resident_bytes() + MAX_GROWTH_BYTES
    for number in cases:
        if time.monotonic() >= until_s:
            break
        os.write(out, f"{number}\n".encode())
        path.write_bytes(case(base, number))
        signal.setitimer(signal.ITIMER_PROF, CASE_S)  # both signals end the process
        signal.alarm(HANG_S)
        try:
            result = "worked" if try_file(path, device) else "refused"
        except Exception:  # noqa: BLE001 - that is what is looked for
            result = "raised " + " | ".join(traceback.format_exc().splitlines()[-5:])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        if _resident_bytes() > most:
            result, most = f"took {_resident_bytes() >> 20} MiB", _resident_bytes() + MAX_GROWTH_BYTES
        os.write(out, f"{result}\n".encode())


def fuzz(seed: int, device: str, *, most: int = 1_000_000, seconds: float = float("inf")) -> Outcome:
    """One whole run of at most so many cases, numbered from `seed` millions on."""
    outcome = Outcome(0, 0, 0, [])
    until_s, number = time.monotonic() + seconds, seed * 1_000_000
    end = number + most
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        shape = TinyShape(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, ffn_size=32)
        base = write_tiny_model(path, shape=shape).read_bytes()
        while number < end and time.monotonic() < until_s:
            path.write_bytes(base)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(reader)
                    _child(base, range(number, end), until_s, device, path, writer)
                    status = 0
                except BaseException:  # noqa: BLE001 - a defect of this program
                    traceback.print_exc()
                finally:
                    os._exit(status)
            os.close(writer)
            with os.fdopen(reader) as lines:
                said = [line.strip() for line in lines]
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for at, result in zip(said[::2], said[1::2], strict=False):
                outcome.cases += 1
                outcome.worked += result == "worked"
                outcome.refused += result == "refused"
                if result not in ("worked", "refused"):
                    outcome.faults.append(f"case {at}: {result}")
            if status:
                outcome.faults.append(f"case {said[-1] if said else number}: the process ended with {status}")
            number += len(said[::2])
            if not said:
                break
    return outcome


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "reference"))
    arguments = parser.parse_args()
    outcome = fuzz(arguments.seed, arguments.device, seconds=arguments.seconds)
    print(msgspec.json.format(msgspec.json.encode(outcome)).decode())
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
