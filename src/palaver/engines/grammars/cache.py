"""The compiled grammars of one model: each tried in the sandbox, compiled once, and shared by its requests."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from palaver.constraints import Constraint
from palaver.engines.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarError, bad_constraint, named_ids
from palaver.engines.grammars.sandbox import GrammarSandbox
from palaver.errors import EngineClosed, PalaverError, QueueFull
from palaver.phases import Vocabulary

COMPILED = 64
REFUSED = 1024
AT_ONCE = 16
SECONDS = 20.0
"""The longest wait for a grammar: for its turn, its trial and its compilation."""
_STACK = 64 << 20
"""Bytes of address space; the sandbox refuses what takes more than a small part of it."""


@dataclass(eq=False)
class _Job:
    future: Future[CompiledGrammar]
    waiters: int = 0


class GrammarCache:
    """Safe to use from several threads and event loops. One grammar never waits for another to compile."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary)
        self._sandbox = GrammarSandbox(vocabulary)
        self._executor = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="palaver-grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._jobs: dict[Constraint, _Job] = {}

    def warm(self) -> None:
        """Starts the sandbox's process and builds the view of the vocabulary, so that no request waits for them."""
        with suppress(GrammarError, PalaverError):  # then the first request says why
            self._sandbox.start()
            self._compiler.tokenizer(())

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises BadParameter where the grammar makes no sense or exceeds its limits, QueueFull where too many wait."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
                return found
            job = self._join(constraint)
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(asyncio.wrap_future(job.future))
        except GrammarError as error:
            raise bad_constraint(constraint, str(error)) from error
        except TimeoutError:
            raise QueueFull(len(self._jobs)) from None
        finally:
            self._leave(job)

    def close(self) -> None:
        self._sandbox.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _join(self, constraint: Constraint) -> _Job:
        job = self._jobs.get(constraint)
        if job is None:
            job = self._jobs[constraint] = _Job(self._submit(constraint))
            job.future.add_done_callback(lambda _: self._jobs.pop(constraint, None))
        job.waiters += 1
        return job

    def _leave(self, job: _Job) -> None:
        """The last one to leave takes the job with it, if that has not begun."""
        with self._lock:
            job.waiters -= 1
            if not job.waiters:
                job.future.cancel()

    def _submit(self, constraint: Constraint) -> Future[CompiledGrammar]:
        before = threading.stack_size(_STACK)  # of the threads that the executor starts here
        try:
            return self._executor.submit(self._compile, constraint)
        except RuntimeError as error:
            raise EngineClosed from error
        finally:
            threading.stack_size(before)

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        self._compiler.tokenizer(named_ids(constraint))
        self._try(constraint)
        compiled = self._compiler.compile(constraint)
        with self._lock:
            self._compiled[constraint] = compiled
            while len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _try(self, constraint: Constraint) -> None:
        content = f"{constraint.grammar} {named_ids(constraint)} {constraint.text}"
        key = sha256(content.encode(errors="surrogatepass")).digest()
        with self._lock:
            why = self._refused.get(key)
        if why is None:
            why = self._sandbox.why_not(constraint)
        if why is None:
            return
        with self._lock:
            self._refused[key] = why
            while len(self._refused) > REFUSED:
                self._refused.popitem(last=False)
        raise GrammarError(why)
