"""What a process frees goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

THREADS, BLOCK_MB = 4, 26
SCRIPT = f"""
import threading
import psutil
from palaver.memory import give_back_unused, return_large_blocks

def memory_mb():
    return psutil.Process().memory_info().rss >> 20

def use_much(freed, done):
    for _ in range(3):
        block = bytearray({BLOCK_MB} << 20)
        del block
    freed.release()
    done.wait()

return_large_blocks()
freed, done, before = threading.Semaphore(0), threading.Event(), memory_mb()
threads = [threading.Thread(target=use_much, args=(freed, done)) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    freed.acquire()
give_back_unused()
print(memory_mb() - before)
done.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_large_blocks_go_back_to_the_system_when_they_are_freed() -> None:
    assert _growth_mb() < BLOCK_MB


def _growth_mb() -> int:
    command = [sys.executable, "-c", SCRIPT]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
