"""What one front-end process holds: its settings, the model's text side, its way to the worker.

Owns: `FrontState`, made at start and passed to every endpoint; no request changes it. Runs in: front
ends.
"""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from ds4 import __version__
from ds4.api.isolation import CacheIsolation
from ds4.api.key_limits import KeyLimits
from ds4.api.keys import load_keys
from ds4.api.response_store import ResponseStore
from ds4.api.sse import KeepAlive
from ds4.config import Settings
from ds4.engine_client import EngineClient
from ds4.errors import ContextOverflowError, RingError
from ds4.model_file import ModelFile
from ds4.protocol.common import SamplingDefaults, Vocabulary, sampling_defaults
from ds4.shared_dir import prepare_shared_directory, shared_directory
from ds4.text.chat_template import ChatTemplate
from ds4.text.grammar_compiler import GrammarCompiler
from ds4.text.output_format import find_output_format
from ds4.text.tokenizer import Tokenizer

# Bodies from this size on are parsed and tokenized in a thread: under it the hop costs more.
OFF_LOOP_BYTES: Final = 16 * 1024
_T = TypeVar("_T")


class ServedModel:
    """The text side of the model, and the names it answers to. Immutable."""

    def __init__(self, settings: Settings, file: ModelFile) -> None:
        self.file = file
        self.tokenizer = Tokenizer.from_model(file)
        self.template = ChatTemplate.from_model(file, self.tokenizer)
        self.output = find_output_format(
            self.template.all_source, self.tokenizer.has_token, takes_tools=self.template.takes_tools
        )
        # Control tokens that a parser has to see.
        self.shown_ids = self.tokenizer.control_ids_in(self.output.markers)
        aliases = [name.strip() for name in settings.model_alias.split(",") if name.strip()]
        self.names: tuple[str, ...] = tuple(dict.fromkeys(aliases)) or (file.path.stem,)
        self.defaults: SamplingDefaults = sampling_defaults(settings, file.metadata)
        self.vocabulary = Vocabulary(
            size=self.tokenizer.vocab_size,
            end_ids=self.tokenizer.end_ids,
            spell=lambda text: self.tokenizer.encode(text, add_special=False, parse_special=False),
        )
        trained = file.max_context_tokens
        self.max_context_tokens = min(settings.ctx, trained) if settings.ctx else trained
        digest = hashlib.sha256(f"{__version__} {file.tokenizer_hash} {file.name}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self.created = int(file.path.stat().st_mtime)  # the same in every front end

    def refuse_absurd(self, text: str, param: str) -> None:
        """Raises ContextOverflowError for text that cannot fit, before a minute goes into its ids."""
        at_least = self.tokenizer.min_tokens(text)
        if at_least > self.max_context_tokens:
            raise ContextOverflowError(at_least, self.max_context_tokens, param=param)


class FrontState:
    """Everything the endpoints share. Owned by the process's one event loop."""

    def __init__(self, settings: Settings, model: ServedModel, engine: EngineClient) -> None:
        self.settings = settings
        self.model = model
        self.engine = engine
        self.keys = load_keys(settings)
        self.limits = KeyLimits(self.keys.values())
        self.isolation = CacheIsolation(settings.cache_isolation, has_keys=bool(self.keys))
        self.leaving = False  # a successor takes the new connections
        self.when_ending: list[Callable[[], None]] = []  # called when the process begins to drain
        self.keep_alive = KeepAlive()
        self.store = ResponseStore(settings, shared_directory(settings))
        self.grammars = GrammarCompiler(model.file.path)
        # Two: a huge prompt shall not hold up a large one. More would only wait for the interpreter lock.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ds4-text")

    @classmethod
    def build(cls, settings: Settings, path: Path) -> "FrontState":
        """Read the model's text side; nothing outside this process changes before `start`.

        Raises ConfigError, ModelFileError.
        """
        directory = shared_directory(settings)
        model = ServedModel(settings, ModelFile.open(path))
        engine = EngineClient(settings, directory, tokenizer_hash=model.file.tokenizer_hash)
        return cls(settings, model, engine)

    async def start(self) -> None:
        """Take the front end's place in the ring. Raises ConfigError, RingFullError, RingError."""
        directory = prepare_shared_directory(self.settings)
        self.isolation.open(directory)
        await self.engine.start()
        try:
            self.limits.open(directory, self.engine.ring.index)
        except RingError:
            await self.engine.close()
            raise

    async def close(self) -> None:
        """Give everything back."""
        self.keep_alive.close()
        await self.store.close()
        await self.grammars.close()
        await self.engine.close()
        self.limits.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def max_context_tokens(self) -> int:
        """The context window of one request, as the worker has it."""
        info = self.engine.model_info
        return info.max_context_tokens if info is not None else self.model.max_context_tokens

    async def compute(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """`work()`, off the loop where its input is large enough to stall the other streams."""
        if size_bytes < OFF_LOOP_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
