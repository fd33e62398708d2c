#!/usr/bin/env python3
"""Compiles the GPU kernels to the archives of PTX and of machine code that the CUDA executor embeds.

    python3 -m venv .venv && .venv/bin/pip install -r tools/cuda/requirements.txt
    .venv/bin/python tools/cuda/build_kernels.py            # writes kernels.ptx.z and kernels.sm_90.z
    .venv/bin/python tools/cuda/build_kernels.py --check    # fails if the archive is not that of the sources
    .venv/bin/python tools/cuda/build_kernels.py --assemble # and assembles every kernel for every architecture

Needs a C++ compiler, no GPU. The compiler is that of the packages beside this Python, else `nvcc` of the PATH.
The PTX is for compute capability 8.0 and says version 8.0, so that drivers from 525 on read it; nothing newer is used.
Machine code is for 9.0, where kernels also use programmatic dependent launch.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "crates/compute/src/gpu/kernels"
ARCHIVE = ROOT / "crates/compute/src/gpu/cuda/kernels.ptx.z"
IMAGES = ARCHIVE.with_name("kernels.sm_90.z")
MARK = "//@ "
FINGERPRINT = "//# "
PTX_VERSION = "8.0"
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
ENCODINGS = ["q4_0", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4", "mxfp4_planes", "f16", "bf16", "affine4", "affine8",
             "fp8", "q4_1", "q5_1", "iq4_nl", "iq4_xs"]


def toolkit() -> Path:
    """Folder of nvcc and ptxas."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin"
    if (packaged / "nvcc").exists():
        return packaged
    found = shutil.which("nvcc")
    if not found:
        sys.exit("no nvcc: install tools/cuda/requirements.txt, or put a toolkit's into the PATH")
    return Path(found).resolve().parent


def fingerprint() -> str:
    """Of the kernels' texts, so that a test without a compiler can tell that the archive is theirs: 64-bit FNV-1a."""
    files = [f for f in [*KERNELS.glob("*.h"), *KERNELS.glob("cuda/*")] if f.is_file()]
    names = sorted((f.relative_to(KERNELS).as_posix(), f) for f in files)
    value = 0xCBF29CE484222325
    for byte in b"".join(name.encode() + b"\n" + file.read_bytes() for name, file in names):
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"


def units() -> list[tuple[str, list[str]]]:
    """Text of each unit as CUDA, with the compiler's definitions."""
    listed = re.search(r"units!\[(.*?)\]", (KERNELS / "mod.rs").read_text(), re.S)
    names = re.findall(r'"(\w+)"', listed.group(1)) if listed else []
    common = [(f'#include "{name}.h"\n', []) for name in names]
    gemm = [('#include "cuda/gemm.cu"\n', [f"-DDTYPE={e.upper()}", f"-DNAME(f)=f##_{e}"]) for e in ENCODINGS]
    others = ["prefill.cu", "flash_attention.cu", "tensor_decode.cu", "early.cu"]
    return common + gemm + [(f'#include "cuda/{file}"\n', []) for file in others]


def compile_unit(tools: Path, folder: Path, index: int, text: str, definitions: list[str]) -> tuple[str, bytes]:
    """PTX and machine code."""
    source = f"unit{index}.cu"
    (folder / source).write_text(text)
    out = (folder / source).with_suffix(".ptx")
    for target in (["-arch=compute_80", "--ptx"], ["-arch=sm_90", "-cubin"]):
        command = [tools / "nvcc", "-std=c++17", "-O3", *target, "-I", KERNELS, *definitions, source]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if run.returncode != 0:
            sys.exit(f"{text}{' '.join(definitions)}\n{run.stdout}{run.stderr}")
    # Comments name files and builds; the texts must depend on the sources alone.
    lines = [line for line in out.read_text().splitlines() if line.strip() and not line.lstrip().startswith("//")]
    ptx = re.sub(r"^\.version .*", f".version {PTX_VERSION}", "\n".join(lines) + "\n", flags=re.M)
    ptx = re.sub(r"_INTERNAL_[0-9a-f]{8}_\d+_unit\d+_cu_", "_", ptx)
    return ptx, out.with_suffix(".cubin").read_bytes()


def split(ptx: str) -> dict[str, str]:
    """Each kernel with what it needs of the unit's own declarations."""
    entry = re.compile(r"^\.visible \.entry (\w+)\(.*?^}\n", re.S | re.M)
    shared = entry.sub("", ptx)
    declared = re.findall(r"^(?:\.\w+ )+(?:\.align \d+ )?\.\w+ (\w+)\[?.*?;\n", shared, re.M | re.S)
    kernels = {}
    for found in entry.finditer(ptx):
        head = shared
        for name in declared:
            if not re.search(rf"\b{re.escape(name)}\b", found.group()):
                head = re.sub(rf"^[^\n]*\b{re.escape(name)}\b[^;]*;\n", "", head, flags=re.M)
        kernels[found.group(1)] = head + found.group()
    return kernels


def assemble(tools: Path, folder: Path, name: str, ptx: str, architecture: str) -> str | None:
    """Assembles a text; says whether registers spill."""
    source = folder / f"{name}.{architecture}.ptx"
    source.write_text(ptx)
    command = [tools / "ptxas", f"-arch={architecture}", "-v", source, "-o", "/dev/null"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{name} for {architecture}: {run.stdout}{run.stderr}")
    spill = re.search(r"\b([1-9]\d*) bytes spill stores", run.stderr)
    return f"note: {name} for {architecture} spills {spill.group(1)} bytes of registers" if spill else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the archive instead of writing it")
    parser.add_argument("--assemble", action="store_true", help="assemble every kernel for every architecture")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    options = parser.parse_args()
    tools = toolkit()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(temporary)
        compiled = list(pool.map(lambda item: compile_unit(tools, folder, item[0], *item[1]), enumerate(units())))
        texts = [text for text, _ in compiled]
        images = f"{FINGERPRINT}{fingerprint()}\n".encode()
        for text, image in compiled:
            images += f"{MARK}{len(image)} {' '.join(sorted(split(text)))}\n".encode() + image
        kernels: dict[str, str] = {}
        for text in texts:
            for name, ptx in split(text).items():
                if name in kernels:
                    sys.exit(f"two kernels are called {name}")
                kernels[name] = ptx
        plain = f"{FINGERPRINT}{fingerprint()}\n" + "".join(f"{MARK}{name}\n{ptx}" for name, ptx in sorted(kernels.items()))
        size = f"{len(kernels)} kernels, {len(plain) >> 10} KiB"
        if options.check:
            head, *archived = zlib.decompress(ARCHIVE.read_bytes()).decode().split(MARK) if ARCHIVE.exists() else [""]
            present = dict(part.split("\n", 1) for part in archived)
            stale = [] if head == plain.split(MARK, 1)[0] else ["fingerprint"]
            stale += sorted(name for name in present.keys() | kernels.keys() if present.get(name) != kernels.get(name))
            if stale:
                sys.exit(f"{ARCHIVE.relative_to(ROOT)} is not that of the sources, run {Path(__file__).name}: "
                         f"{', '.join(stale)}")
            # Machine code names what the compiler is run on, so that only its sources are compared.
            archived_images = zlib.decompress(IMAGES.read_bytes()) if IMAGES.exists() else b""
            if archived_images.split(b"\n", 1)[0] != images.split(b"\n", 1)[0]:
                sys.exit(f"{IMAGES.relative_to(ROOT)} is not that of the sources, run {Path(__file__).name}")
            print(f"{size}: as the sources say")
        else:
            ARCHIVE.write_bytes(zlib.compress(plain.encode(), 9))
            IMAGES.write_bytes(zlib.compress(images, 9))
            print(f"{size}, {ARCHIVE.stat().st_size >> 10} KiB deflated; machine code {len(images) >> 10} KiB, "
                  f"{IMAGES.stat().st_size >> 10} KiB deflated")
        if options.assemble:
            jobs = [(f"unit{i}", text, a) for i, text in enumerate(texts) for a in ARCHITECTURES]
            notes = [note for note in pool.map(lambda job: assemble(tools, folder, *job), jobs) if note]
            print("\n".join([*notes, f"assembled for {', '.join(ARCHITECTURES)}"]))


main()
