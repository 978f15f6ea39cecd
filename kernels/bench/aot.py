"""Compile every Triton kernel ahead of time for GPU architectures and check the result. Needs no GPU.

    python -m kernels.bench.aot --arch 80,86,89,90,100,120     every form that the modules list, and of real models
    python -m kernels.bench.aot --arch 90 --tests              also those that the kernel tests launch
    python -m kernels.bench.aot --arch 90 --module M --match TEXT --most N --asm DIR --lines

A form is bad if it does not compile, needs more shared memory than the chip has, spills more than MAX_SPILLED_BYTES per
thread (KNOWN_SPILLS lists exceptions), or accesses memory in narrow pieces although its variant is `wide`. A
kernel that is launched but not listed in `variants` is bad, too. Prints the bad forms and a table of kernels; with
`--lines` one JSON object per form: {"variant", "kernel", "arch", "registers", "shared_bytes", "spilled_bytes",
"error"}. Exit status 1 if a form is bad. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = Path(__file__).resolve().parents[1]
if str(KERNELS) not in sys.path:
    sys.path.insert(0, str(KERNELS))

import triton  # noqa: E402
from chatcache_kernels.triton.variants import Variant  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bench.model_variants import model_variants  # noqa: E402
from bench.record_launches import read_recorded  # noqa: E402
from chatcache.bench.report import format_table  # noqa: E402

PACKAGE = "chatcache_kernels.triton"
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of a program, by compute capability (CUDA C++ Programming Guide)."""

MAX_SPILLED_BYTES = 16
RECURRENT = "Prompts of recurrent layers, whose float32 products are three of tf32; the cost is not measured."
KNOWN_SPILLS = (
    (
        r"sm_(80|86|89) .*\.paged_attention_kernel .*ROWS=(64|128) .*GROUP=(3|5|6|7) .*HEAD_DIM=128 ", 80,
        "Prompt tiles on Ampere and Ada for group sizes that are no power of two: 24 to 72 bytes of more than 255 "
        "registers; the cost is not measured.",
    ),
    (
        r"sm_90 .*latent_attention_kernel .*ROWS=64 ", 360,
        "Tiles of 64 queries, whose results take 128 registers of each thread: a few moves for a tile of 9 MFLOP.",
    ),
    (
        r"sm_90 .*\.paged_attention_kernel .*fp8e4nv", 160,
        "Tiles of FP8 pages, whose numbers are converted in registers: measured faster than smaller tiles and than "
        "more warps, which do not spill.",
    ),
    (r"sm_(80|86|89) .*delta_chunk_kernel .*PRECISION=tf32 ", 32, RECURRENT),
    (r"sm_120 .*delta_chunk_kernel .*PRECISION=tf32 ", 64, RECURRENT),
    (r"sm_80 .*delta_chunk_kernel .*PRECISION=tf32x3 ", 256, RECURRENT),
    (r"sm_(86|89|90) .*delta_chunk_kernel .*PRECISION=tf32x3 ", 240, RECURRENT),
    (r"sm_100 .*delta_chunk_kernel .*PRECISION=tf32x3 ", 176, RECURRENT),
    (r"sm_120 .*delta_chunk_kernel .*PRECISION=tf32x3 ", 312, RECURRENT),
    (r"sm_(80|86|89) .*ssd_chunk_kernel .*PRECISION=tf32x3 ", 448, RECURRENT),
    (r"sm_(90|100) .*ssd_chunk_kernel .*PRECISION=tf32x3 ", 88, RECURRENT),
    (r"sm_120 .*ssd_chunk_kernel .*PRECISION=tf32x3 ", 128, RECURRENT),
)  # fmt: skip
"""Pattern of "sm_ARCH VARIANT", most spilled bytes, and the reason why more than MAX_SPILLED_BYTES are accepted."""

WIDE = r"\.global[.\w:]*\.v(4\.[a-z]+32|2\.[a-z]+64|8\.[a-z]+32|4\.[a-z]+64)\b"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The report of one form: per thread registers and spilled bytes, per program shared bytes."""

    variant: str
    kernel: str
    arch: int
    registers: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0
    error: str | None = None


# -- the forms ----------------------------------------------------------------------------------------------------


def package_modules() -> list[ModuleType]:
    """Return the modules of the package."""
    package = importlib.import_module(PACKAGE)
    return [importlib.import_module(f"{PACKAGE}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]


def launched_kernels(module: ModuleType) -> set[str]:
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


def listed_variants(module: ModuleType, arch: int) -> list[Variant]:
    """Return a module's variants; none for an architecture older than its MIN_ARCH.

    Raises: LookupError for a kernel that the module launches but does not list.
    """
    if arch < getattr(module, "MIN_ARCH", 0):
        return []
    found = list(module.variants(arch)) if hasattr(module, "variants") else []
    if missing := launched_kernels(module) - {one.kernel.__name__ for one in found}:
        raise LookupError(f"{module.__name__}: variants() lists nothing for {', '.join(sorted(missing))}")
    return found


@dataclass(frozen=True, slots=True)
class Selection:
    """Which forms to compile.

    `modules`: these instead of the package's, without models. `match`: part of the names. `most`: at most so many of
    each kernel, drawn at random with `seed`; 0 for all. `recorded`: a file of forms that the tests launch.
    """

    modules: tuple[str, ...] = ()
    match: str = ""
    most: int = 0
    seed: int = 0
    recorded: Path | None = None

    def variants(self, arch: int) -> list[Variant]:
        """Return the selected variants, each once. Raises: LookupError as `listed_variants` does."""
        modules = [importlib.import_module(name) for name in self.modules] or package_modules()
        found = [variant for module in modules for variant in listed_variants(module, arch)]
        if not self.modules:
            found += model_variants(arch)
        if self.recorded is not None:
            found += read_recorded(self.recorded)
        unique = list(
            {_identity(variant): variant for variant in reversed(found) if self.match in variant.name}.values()
        )
        return _sample(unique[::-1], self.most, self.seed) if self.most else unique[::-1]


def _identity(variant: Variant) -> str:
    """Return equal strings for variants that compile to the same code and have the same requirement."""
    values = variant.signature, variant.constexprs, variant.options
    parts = [sorted((name, str(value)) for name, value in each.items()) for each in values]
    return f"{variant.kernel.__module__}.{variant.kernel.__name__} {parts} {variant.aligned} {variant.wide}"


def _sample(variants: list[Variant], most: int, seed: int) -> list[Variant]:
    """Return a random sample of at most `most` variants of each kernel."""
    kinds: dict[str, list[Variant]] = {}
    for one in random.Random(seed).sample(variants, len(variants)):
        kinds.setdefault(one.kernel.__name__, []).append(one)
    return [one for kind in kinds.values() for one in kind[:most]]


def record_tests(arch: int, file: Path) -> None:
    """Interpret the kernel tests with the configurations of `arch`, and record the forms that they launch.

    Raises: subprocess.CalledProcessError if a test fails.
    """
    variables = {**os.environ, "TRITON_INTERPRET": "1", "GPU_FORMS": f"{arch}:{file}"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(KERNELS), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "bench.record_launches", "--tier", "all"]
    tests = ["kernels/tests", "tests/model/test_triton_sampler.py", "-k", "triton and not compile and not bench"]
    subprocess.run([*command, *tests], cwd=KERNELS.parent, env=variables, check=True, stdout=sys.stderr)


# -- compiling ----------------------------------------------------------------------------------------------------


def compile_variant(variant: Variant, arch: int) -> Any:
    """Return Triton's compiled kernel."""
    names = list(variant.signature)
    aligned = variant.aligned
    if aligned is None:
        aligned = tuple(name for name, kind in variant.signature.items() if kind.startswith("*"))
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constexprs), attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(variant.options))


def read_resources(cubin: bytes) -> dict[str, int]:
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


def count_spilled_bytes(ptx: str, arch: int) -> int:
    """Return the bytes per thread that the assembler stores and loads again for want of registers."""
    (target,) = re.findall(r"\.target (\w+)", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max((int(stores) for stores in re.findall(r"(\d+) bytes spill stores", text)), default=0)


def find_problem(variant: Variant, arch: int, kernel: Any, spilled_bytes: int) -> str | None:
    """Return the problem of a compiled kernel, or None."""
    if kernel.metadata.shared > SHARED_BYTES[arch]:
        return f"needs {kernel.metadata.shared} bytes of shared memory; this chip has {SHARED_BYTES[arch]}"
    name = f"sm_{arch} {variant.name}"
    limit = next((most for pattern, most, _ in KNOWN_SPILLS if re.search(pattern, name)), MAX_SPILLED_BYTES)
    if spilled_bytes > limit:
        return f"spills {spilled_bytes} bytes per thread; accepted are {limit}"
    for access in ("ld", "st"):
        if variant.wide and not re.search(access + WIDE, kernel.asm["ptx"]):
            return f"no 16-byte {access}.global"
    return None


def examine(variant: Variant, arch: int, folder: Path | None = None) -> Compiled:
    """Compile one variant and report on it; write PTX and machine code into `folder`."""
    name = variant.kernel.__name__
    try:
        kernel = compile_variant(variant, arch)
        used = read_resources(kernel.asm["cubin"])
        ptx = kernel.asm["ptx"]
        spilled = count_spilled_bytes(ptx, arch) if used["STACK"] or used["LOCAL"] else 0
    except Exception as error:
        return Compiled(variant.name, name, arch, error=f"{type(error).__name__}: {error}")
    if folder is not None:
        stem = re.sub(r"\W+", "_", variant.name.removeprefix(PACKAGE + "."))[:150]
        (folder / f"{stem}.{arch}.ptx").write_text(ptx)
        (folder / f"{stem}.{arch}.cubin").write_bytes(kernel.asm["cubin"])
    problem = find_problem(variant, arch, kernel, spilled)
    return Compiled(variant.name, name, arch, used["REG"], kernel.metadata.shared, spilled, problem)


BATCH = 4
"""Forms that a worker process compiles at a time."""


def _examine_part(selection: Selection, arch: int, start: int, folder: Path | None) -> list[Compiled]:
    return [examine(variant, arch, folder) for variant in selection.variants(arch)[start : start + BATCH]]


def compile_forms(selection: Selection, arch: int, num_jobs: int, folder: Path | None) -> Iterator[Compiled]:
    """Compile the selected forms in `num_jobs` processes and yield their reports."""
    try:
        count = len(selection.variants(arch))
    except Exception as error:
        yield Compiled(PACKAGE, "", arch, error=f"{type(error).__name__}: {error}")
        return
    starts = range(0, count, BATCH)
    if num_jobs == 1:
        parts: Iterable[list[Compiled]] = (_examine_part(selection, arch, start, folder) for start in starts)
        yield from itertools.chain.from_iterable(parts)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        repeated = [itertools.repeat(each) for each in (selection, arch)]
        parts = pool.map(_examine_part, *repeated, starts, itertools.repeat(folder))
        yield from itertools.chain.from_iterable(parts)


# -- the report ---------------------------------------------------------------------------------------------------


def summarize(reports: Sequence[Compiled]) -> str:
    """Return a table with a row per kernel and a column per architecture.

    A cell has the number of forms, the fewest and most registers, the most shared KiB and the most spilled bytes.
    """
    archs = list(dict.fromkeys(one.arch for one in reports))
    rows: list[tuple[str, ...]] = []
    for kernel in sorted({one.kernel for one in reports}):
        cells = [[one for one in reports if (one.kernel, one.arch) == (kernel, arch)] for arch in archs]
        rows.append((kernel, *map(_summarize_cell, cells)))
    return format_table(("kernel", *(f"sm_{arch}" for arch in archs)), rows, "<" * (1 + len(archs)))


def _summarize_cell(reports: Sequence[Compiled]) -> str:
    compiled = [one for one in reports if one.registers]
    if not compiled:
        return "-"
    registers = [one.registers for one in compiled]
    shared, spilled = max(one.shared_bytes for one in compiled), max(one.spilled_bytes for one in compiled)
    bad = sum(one.error is not None for one in reports)
    span = f"{min(registers)}-{max(registers)}" if len(set(registers)) > 1 else f"{registers[0]}"
    parts = [f"{len(reports)}", f"{span} r", f"{shared / 1024:.1f} K"]
    return "; ".join(parts + [f"{spilled} B spilled"] * (spilled > 0) + [f"{bad} BAD"] * (bad > 0))


def main() -> int:
    """Compile, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.aot",
        description="Compile every Triton kernel ahead of time and check the result.",
    )
    capabilities = ", ".join(map(str, SHARED_BYTES))
    parser.add_argument(
        "--arch", default="90", help=f"compute capabilities, separated by commas: {capabilities}; default: 90"
    )
    parser.add_argument("--tests", action="store_true", help="also the forms that the kernel tests launch")
    parser.add_argument("--recorded", type=Path, help="also the forms in this file of `record_launches`")
    parser.add_argument(
        "--module", action="append", default=[], help="compile this one; default: all modules and models"
    )
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    parser.add_argument("--most", type=int, default=0, help="maximum number of forms per kernel, drawn at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="seed of that draw")
    parser.add_argument("--asm", type=Path, help="write PTX and machine code here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--lines", action="store_true", help="print a JSON object for each form instead of the table")
    options = parser.parse_args()
    archs = [int(text) for text in options.arch.split(",") if text.isdigit()]
    if not archs or not set(archs) <= SHARED_BYTES.keys():
        parser.error(f"--arch must list some of {','.join(map(str, SHARED_BYTES))}, not {options.arch}")
    reports: list[Compiled] = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in archs:
            recorded = options.recorded
            if options.tests:
                recorded = Path(folder) / f"forms-{arch}.jsonl"
                record_tests(arch, recorded)
            selection = Selection(tuple(options.module), options.match, options.most, options.seed, recorded)
            for one in compile_forms(selection, arch, options.jobs, options.asm):
                reports.append(one)
                if options.lines:
                    print(json.dumps(asdict(one)), flush=True)
                elif one.error is not None:
                    print(f"BAD sm_{arch} {one.variant}\n    {one.error}", flush=True)
    num_bad = sum(one.error is not None for one in reports)
    if not options.lines:
        print(summarize(reports))
        print(f"triton {triton.__version__}: {len(reports)} forms compiled, {num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
