"""Builds step.c and its headers into a shared library in the user's cache, once for each machine and compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from palaver.errors import CantCompile

SOURCE = Path(__file__).with_name("step.c")
HEADERS = tuple(SOURCE.with_name(name) for name in ("attention.h", "panels.h", "products.h", "threads.h", "vectors.h"))
BUILD_SECONDS = 120
CHECK_SECONDS = 60
BASE_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
FLAG_SETS = (("-march=native", "--param=avoid-fma-max-bits=0"), ("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler takes the same flag for its machine. For some processors gcc would fuse
multiplications and additions in some loops alone, which rounds differently."""
NO_COMPILER = "no C compiler was found; install gcc or clang"
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).palaver_check())"


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled code."""

    functions: ctypes.CDLL
    build: str
    """Hashes of everything the code depends on: source, flags and processor, and the compiler."""


def start_build() -> Future[Library]:
    """Runs `load_compiled_library` in a thread of its own, while the model's weights are loaded."""
    future: Future[Library] = Future()

    def build() -> None:
        try:
            future.set_result(load_compiled_library())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=build, name="compile", daemon=True).start()
    return future


def load_compiled_library() -> Library:
    """Loads the library from the cache, or builds it. Raises CantCompile with the reason where that fails.

    A library is loaded into this process only after it ran in another one: a file that is damaged, or built for
    another processor, would end the process that uses it. Such a file is built anew. Its hash is stored once it has
    passed, so that the next start need not try it again. Without a compiler an earlier build is used.
    """
    cache, source = _cache(), _source_key()
    try:
        compiler = _find_compiler()
    except CantCompile:
        earlier = next(filter(_is_usable, sorted(cache.glob(f"step-{source}-*.so"))), None)
        if earlier is None:
            raise
        return _load(earlier)
    path = cache / f"step-{source}-{_compiler_key(compiler)}.so"
    if not _is_usable(path):
        with _build_folder(cache) as folder:
            built = folder / path.name
            _compile(compiler, built)
            if not passes_self_check(built):
                raise CantCompile("the compiled code doesn't run on this machine")
            if folder.parent != cache:  # the cache isn't writable: the code stays loaded, the file is removed
                return _load(built)
            built.replace(path)  # atomic: others may build and load it at the same time
            _record_pass(path)
    return _load(path)


def can_build() -> bool:
    """Whether there is a compiler, or an earlier build."""
    try:
        _find_compiler()
    except CantCompile:
        return any(_cache().glob(f"step-{_source_key()}-*.so"))
    return True


def _cache() -> Path:
    from platformdirs import user_cache_path  # imported only where something is built

    return user_cache_path("palaver") / "compiled"


def _load(path: Path) -> Library:
    return Library(ctypes.CDLL(str(path)), path.stem.removeprefix("step-"))


def _is_usable(path: Path) -> bool:
    """Whether the library is there and passed the self-check, now or before."""
    try:
        if _hash_file(path).read_text("utf-8") == _file_hash(path):
            return True
    except (OSError, ValueError):
        pass
    if not passes_self_check(path):
        return False
    _record_pass(path)
    return True


def _record_pass(path: Path) -> None:
    with suppress(OSError):  # the cache isn't writable: it is checked at each start
        _hash_file(path).write_text(_file_hash(path), "utf-8")


def _hash_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find_compiler() -> tuple[str, ...]:
    """The compiler and its own flags, as in CC="gcc -march=haswell"."""
    try:
        requested = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CantCompile(f"the variable CC can't be read as a command: {error}") from None
    for name, *flags in ([requested] if requested else []) + [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(name)
        if found:
            return (found, *flags)
    raise CantCompile(NO_COMPILER)


def _source_key() -> str:
    """A hash of the sources, the flags and the processor."""
    parts = (
        *(path.read_text("utf-8") for path in (SOURCE, *HEADERS)),
        platform.machine(),
        _processor_features(),
        repr((BASE_FLAGS, FLAG_SETS)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler_key(compiler: tuple[str, ...]) -> str:
    """A hash of the compiler, its own flags and its version."""
    command = [compiler[0], "--version"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CantCompile(str(error)) from error
    return hashlib.sha256("\0".join((*compiler, version)).encode()).hexdigest()[:8]


def _processor_features() -> str:
    """The processor's features: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@contextmanager
def _build_folder(cache: Path) -> Iterator[Path]:
    """A temporary folder to build in: inside the cache, or elsewhere where the cache isn't writable."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache)
    except OSError:
        folder = tempfile.TemporaryDirectory(prefix="palaver-")
    with folder as name:
        yield Path(name)


def _compile(compiler: tuple[str, ...], out: Path) -> None:
    message = ""
    for flags in FLAG_SETS:
        command = [compiler[0], *BASE_FLAGS, *flags, *compiler[1:], str(SOURCE), "-o", str(out), "-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CantCompile(str(error)) from error
        if result.returncode == 0:
            return
        message = message or result.stderr
    raise CantCompile(f"{Path(compiler[0]).name} can't compile it: {message.strip()[-400:]}")


def passes_self_check(library: Path) -> bool:
    """Whether the code runs here and computes correctly. Runs in a child process, which may crash."""
    if not library.exists():
        return False
    command = [sys.executable, "-I", "-S", "-c", _CHECK, str(library)]
    try:
        return subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
