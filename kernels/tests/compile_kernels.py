"""Compile every listed Triton variant for given GPU architectures and report the result.

    python kernels/tests/compile_kernels.py --arch 90 [--module NAME ...] [--match TEXT] [--most N] [--asm DIR]

Needs no GPU; run it without TRITON_INTERPRET. Prints one JSON object per line: {"variant", "arch", "registers",
"shared_bytes", "error"}. `error` is null or the problem: compilation fails, registers spill, more shared memory is
needed than the chip has, or memory access is narrow although `wide` is set. A kernel that is launched but not listed in
`variants` is an error.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import random
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from chatcache_kernels.triton.variants import Variant
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

PACKAGE = "chatcache_kernels.triton"
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of a program, by compute capability (CUDA C++ Programming Guide)."""

WIDE = r"\.global[.\w:]*\.v(4\.[a-z]+32|2\.[a-z]+64|8\.[a-z]+32|4\.[a-z]+64)\b"


def modules() -> list[ModuleType]:
    """Return the modules of the package."""
    package = importlib.import_module(PACKAGE)
    return [importlib.import_module(f"{PACKAGE}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]


def launched(module: ModuleType) -> set[str]:
    """Return the names of the kernels that a module launches: kernel[grid](...)."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        ):
            names.add(node.func.value.id)
    return {name for name in names if isinstance(getattr(module, name, None), JITFunction)}


def listed(module: ModuleType, arch: int) -> list[Variant]:
    """Return a module's variants.

    Raises: LookupError for a kernel that the module launches but does not list.
    """
    found = list(module.variants(arch)) if hasattr(module, "variants") else []
    if missing := launched(module) - {one.kernel.__name__ for one in found}:
        raise LookupError(f"{module.__name__}: variants() lists nothing for {', '.join(sorted(missing))}")
    return found


def compile_variant(variant: Variant, arch: int) -> Any:
    """Return Triton's compiled kernel."""
    names = list(variant.signature)
    aligned = variant.aligned
    if aligned is None:
        aligned = tuple(name for name, kind in variant.signature.items() if kind.startswith("*"))
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constexprs), attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(variant.options))


def resources(cubin: bytes) -> dict[str, int]:
    """Return the kernel's resource usage (REG, STACK, LOCAL).

    Raises: RuntimeError if cuobjdump fails.
    """
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [tool, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"{tool} does not run here: {error}") from error
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def problem(variant: Variant, arch: int, kernel: Any, used: dict[str, int]) -> str | None:
    """Return the problem of a compiled kernel, or None."""
    if kernel.metadata.shared > SHARED_BYTES[arch]:
        return f"needs {kernel.metadata.shared} bytes of shared memory; this chip has {SHARED_BYTES[arch]}"
    if used["STACK"] or used["LOCAL"]:
        return f"spills: {used['STACK']} bytes of stack, {used['LOCAL']} of local memory"
    for access in ("ld", "st"):
        if variant.wide and not re.search(access + WIDE, kernel.asm["ptx"]):
            return f"no 16-byte {access}.global"
    return None


def examine(variant: Variant, arch: int, folder: Path | None) -> dict[str, Any]:
    """Compile one variant and return its report line."""
    line: dict[str, Any] = {"variant": variant.name, "arch": arch, "registers": 0, "shared_bytes": 0, "error": None}
    try:
        kernel = compile_variant(variant, arch)
        used = resources(kernel.asm["cubin"])
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {error}"}
    if folder is not None:
        stem = re.sub(r"\W+", "_", variant.name.removeprefix(PACKAGE + "."))[:150]
        (folder / f"{stem}.{arch}.ptx").write_text(kernel.asm["ptx"])
        (folder / f"{stem}.{arch}.cubin").write_bytes(kernel.asm["cubin"])
    sizes = {"registers": used["REG"], "shared_bytes": kernel.metadata.shared}
    return line | sizes | {"error": problem(variant, arch, kernel, used)}


def some(variants: list[Variant], most: int) -> list[Variant]:
    """Return a random sample of at most `most` variants of each kernel."""
    kinds: dict[str, list[Variant]] = {}
    for one in random.sample(variants, len(variants)):
        kinds.setdefault(one.kernel.__name__, []).append(one)
    return [one for kind in kinds.values() for one in kind[:most]]


def report(names: Iterable[str], arch: int, match: str, most: int, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a line per variant, and per module with unlisted kernels."""
    for module in [importlib.import_module(name) for name in names] or modules():
        try:
            variants = listed(module, arch)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            yield {"variant": module.__name__, "arch": arch, "registers": 0, "shared_bytes": 0, "error": text}
            continue
        wanted = [one for one in variants if match in one.name]
        for variant in some(wanted, most) if most else wanted:
            yield examine(variant, arch, folder)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, required=True, choices=sorted(SHARED_BYTES))
    parser.add_argument("--module", action="append", default=[], help="instead of those of the package")
    parser.add_argument("--match", default="", help="only variants whose name holds this")
    parser.add_argument("--most", type=int, default=0, help="of each kernel no more than these, drawn at random")
    parser.add_argument("--asm", type=Path, help="write PTX and machine code here")
    options = parser.parse_args()
    for line in report(options.module, options.arch, options.match, options.most, options.asm):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
