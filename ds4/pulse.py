"""Signs of life from a child to the supervisor that started it.

Owns: the two words of one anonymous memory file per child: how often it beat, and how far it has come.
Runs in: the supervisor (makes and reads it), front ends and worker (write it). Source: memfd_create(2).

Nothing is left behind by a process that dies, and nobody has to look a process up by its number. Only
changes count: a child that was never heard of yet is starting, and `ds4.children` looks whether it does anything.
"""

import os
import struct
import time
from enum import IntEnum
from typing import Final

_WORDS: Final = struct.Struct("<QQ")
BEAT_S: Final = 0.25


class Stage(IntEnum):
    """How far a child has come. Writer: the child."""

    STARTING = 0
    LOADED = 1  # a worker that could serve and waits for its predecessor to leave the ring
    SERVING = 2


class Pulse:
    """The child's end. `fd` None: nobody watches."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._beats = 0
        if fd is not None:
            os.set_inheritable(fd, False)

    def beat(self, stage: Stage) -> None:
        """Say that this process comes round, and where it stands."""
        if self._fd is not None:
            self._beats += 1
            os.pwrite(self._fd, _WORDS.pack(self._beats, stage), 0)


class PulseWatch:
    """The supervisor's end. `fd` is for the child to inherit."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ds4-pulse", os.MFD_CLOEXEC)
        os.pwrite(self.fd, _WORDS.pack(0, Stage.STARTING), 0)
        self.stage = Stage.STARTING
        self._beats = 0
        self._changed_s = 0.0

    @property
    def is_heard(self) -> bool:
        """Whether there was a beat, as of the latest `silent_s`."""
        return self._beats > 0

    def silent_s(self, now_s: float) -> float:
        """For how long nothing was heard, since the last change; 0 before the first beat."""
        beats, stage = _WORDS.unpack(os.pread(self.fd, _WORDS.size, 0))
        self.stage = Stage(min(stage, Stage.SERVING))
        if beats != self._beats:
            self._beats, self._changed_s = beats, now_s
        return now_s - self._changed_s if beats else 0.0

    def forgive(self) -> None:
        """What was not heard so far does not count: the listener itself was away."""
        if self._beats:
            self._changed_s = time.monotonic()

    def close(self) -> None:
        """Give the memory back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def take_option(arguments: list[str], name: str) -> tuple[int | None, list[str]]:
    """A leading `name NUMBER`, which only the supervisor passes, and the arguments after it."""
    if arguments[:1] == [name]:
        return int(arguments[1]), arguments[2:]
    return None, arguments
