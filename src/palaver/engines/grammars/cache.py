"""The compiled grammars of one model. Each is checked in a sandbox, compiled once and shared by requests."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from palaver.constraints import Constraint
from palaver.engines.grammars.compiler import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    bad_constraint,
    special_ids,
)
from palaver.engines.grammars.sandbox import GrammarSandbox
from palaver.errors import EngineClosed, PalaverError, QueueFull
from palaver.phases import Vocabulary

MAX_COMPILED = 64
MAX_REJECTED = 1024
MAX_WORKERS = 16
TIMEOUT_S = 20.0
"""The longest wait for a grammar: in the queue, in the sandbox and in the compiler."""
_STACK_BYTES = 64 << 20
"""Address space; the sandbox rejects grammars that use more than a small part of it."""


@dataclass(eq=False)
class _CompileJob:
    future: Future[CompiledGrammar]
    waiters: int = 0


class GrammarCache:
    """Safe to use from several threads and event loops. One grammar never waits for another to compile."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = GrammarCompiler(vocabulary)
        self._sandbox = GrammarSandbox(vocabulary)
        self._executor = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="palaver-grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._rejected: OrderedDict[bytes, str] = OrderedDict()
        self._jobs: dict[Constraint, _CompileJob] = {}

    def warm(self) -> None:
        """Starts the sandbox's process and builds the tokenizer, so that no request waits for them."""
        with suppress(GrammarError, PalaverError):  # the first request reports the error
            self._sandbox.start()
            self._compiler.tokenizer(())

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises BadParameter if the grammar is invalid or exceeds its limits, QueueFull if too many are waiting."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
                return found
            job = self._join(constraint)
        try:
            async with asyncio.timeout(TIMEOUT_S):
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

    def _join(self, constraint: Constraint) -> _CompileJob:
        job = self._jobs.get(constraint)
        if job is None:
            job = self._jobs[constraint] = _CompileJob(self._submit(constraint))
            job.future.add_done_callback(lambda _: self._jobs.pop(constraint, None))
        job.waiters += 1
        return job

    def _leave(self, job: _CompileJob) -> None:
        """Cancels a job that has not started once its last waiter has left."""
        with self._lock:
            job.waiters -= 1
            if not job.waiters:
                job.future.cancel()

    def _submit(self, constraint: Constraint) -> Future[CompiledGrammar]:
        before = threading.stack_size(_STACK_BYTES)  # for the threads that the executor starts here
        try:
            return self._executor.submit(self._compile, constraint)
        except RuntimeError as error:
            raise EngineClosed from error
        finally:
            threading.stack_size(before)

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        self._compiler.tokenizer(special_ids(constraint))
        self._check_in_sandbox(constraint)
        compiled = self._compiler.compile(constraint)
        with self._lock:
            self._compiled[constraint] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _check_in_sandbox(self, constraint: Constraint) -> None:
        content = f"{constraint.grammar} {special_ids(constraint)} {constraint.text}"
        key = sha256(content.encode(errors="surrogatepass")).digest()
        with self._lock:
            reason = self._rejected.get(key)
        if reason is None:
            reason = self._sandbox.rejection_reason(constraint)
        if reason is None:
            return
        with self._lock:
            self._rejected[key] = reason
            while len(self._rejected) > MAX_REJECTED:
                self._rejected.popitem(last=False)
        raise GrammarError(reason)
