"""What the C++ compiler of this machine lacks for AOTInductor, found before it is used."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from dsa_compile.errors import Need

_PROBE = """
#include <locale>
extern "C" unsigned long probe() { return std::locale().name().size(); }
"""
_RUNTIMES = (b"libstdc++.so", b"libc++.so")


def compiler_needs() -> list[Need]:
    """What AOTInductor lacks here for the code of the host."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        tried = ", ".join(str(name) for name in config.cpp.cxx if name)
        mend = "install g++, or name a compiler in the environment variable CXX"
        return [Need(f"no C++ compiler works here (tried {tried})", mend)]
    fault = runtime_fault(compiler)
    mend = "name a compiler in the environment variable CXX that links it dynamically"
    return [] if fault is None else [Need(fault, mend)]


@cache
def runtime_fault(compiler: str) -> str | None:
    """Why libraries of a compiler cannot be loaded beside PyTorch, or None.

    Locales and regular expressions of a C++ runtime of their own, linked into a library, mix with
    those of PyTorch's: loading such a package fails or ends the process.
    """
    if not sys.platform.startswith("linux"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(_PROBE)
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as fault:
            return f"the C++ compiler {compiler} does not run: {fault}"
        if done.returncode != 0 or not library.exists():
            why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            return f"the C++ compiler {compiler} makes no shared library: {why}"
        if not any(name in library.read_bytes() for name in _RUNTIMES):
            return f"the C++ compiler {compiler} links its C++ runtime statically into libraries"
    return None
