#!/usr/bin/env python3
"""Compiles the GPU kernels to the archives of PTX and of machine code that the CUDA executor embeds.

    python3 -m venv .venv && .venv/bin/pip install -r tools/cuda/requirements.txt
    .venv/bin/python tools/cuda/build_kernels.py            # compiles the units whose sources have changed
    .venv/bin/python tools/cuda/build_kernels.py --assemble # and assembles those that are not in the record, and records them
    .venv/bin/python tools/cuda/build_kernels.py --check --assemble # fails if archives are not of the sources

`--check` compiles and assembles what the record does not have, and one other small unit for one architecture, others for every
commit; with `--all` every unit, which takes a processor an hour. The record, `archives/checked.txt`, has a sum over sources, archives, compiler
and architectures of every unit that was compiled from these sources to these archives and assembled.

A unit is a file of kernels, or one for an encoding of weights; it has a file in `archives/ptx`, one in `archives/sm_90`
and a row in `archives/index.rs`. Needs a C++ compiler, no GPU. The compiler is that of the packages beside this Python,
else `nvcc` of the PATH. The PTX is for compute capability 8.0 and says version 8.0, so that drivers from 525 on read it;
nothing newer is used. Machine code is for 9.0, where kernels also use programmatic dependent launch.
"""

import argparse
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "crates/compute/src/gpu/kernels"
ARCHIVES = ROOT / "crates/compute/src/gpu/cuda/archives"
INDEX = ARCHIVES / "index.rs"
RECORD = ARCHIVES / "checked.txt"
MARK = "//@ "
# Files `cuda/panel_….h` of the encodings whose experts pass through shared memory.
COLUMNS = ["columns", "planes", "low_bit", "codebooks"]
PTX_VERSION = "8.0"
MOST_COMPILED_AGAIN = 4
# Bytes of archives: large units take minutes to compile.
MOST_BY_TURNS = 96 << 10
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


class Unit(NamedTuple):
    name: str
    # Of the kernels' folder.
    file: str
    # Compiled once for each, if for several.
    encoding: str | None = None

    def target(self) -> str:
        """Of machine code: what only 9.0 has, warp groups among it, is asked for by name."""
        files = ("wide", "warpgroup_attention", "latent_attention", "chosen_attention", "latent_products")
        return "sm_90a" if self.file in [f"cuda/{name}.cu" for name in files] else "sm_90"

    def definitions(self) -> list[str]:
        e = self.encoding
        return [f"-DDTYPE={e.upper()}", f"-DNAME(f)=f##_{e}", f"-DSUFFIX={e}"] if e else []


class Compiled(NamedTuple):
    # By kernel.
    texts: dict[str, str]
    whole: str
    image: bytes


class Row(NamedTuple):
    """Of the index."""
    fingerprint: str
    kernels: list[str]


def toolkit() -> Path:
    """Folder of nvcc and ptxas."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin"
    if (packaged / "nvcc").exists():
        return packaged
    found = shutil.which("nvcc")
    if not found:
        sys.exit("no nvcc: install tools/cuda/requirements.txt, or put a toolkit's into the PATH")
    return Path(found).resolve().parent


def units() -> list[Unit]:
    listed = re.search(r"units!\[(.*?)\]", (KERNELS / "mod.rs").read_text(), re.S)
    names = re.findall(r'"(\w+)"', listed.group(1)) if listed else []
    common = [Unit(name, f"{name}.h") for name in names]
    # Those that the table says have kernels for tensor cores.
    tensors = re.findall(r"^ +X\((\w+), .*, +(\w+), +\w+\)", (KERNELS / "encodings.h").read_text(), re.M)
    gemm = [Unit(f"gemm_{name}", "cuda/gemm.cu", name) for name, tensor in tensors if tensor == "yes"]
    rows = re.findall(r"^ +X\((\w+), .*, +(\w+), +\w+, +\w+, +\w+\)", (KERNELS / "encodings.h").read_text(), re.M)
    wide = [Unit(f"wide_{name}", "cuda/wide.cu", name) for name, tensor in tensors if tensor == "yes"]
    batched = [Unit(f"batched_{name}", "cuda/batched.h", name) for name, few in rows if few == "bytes"]
    panels = [Unit(f"panels_{name}", "cuda/panels.cu", name) for name, tensor in tensors if tensor == "yes"]
    panels += [Unit(f"products_{name}", "cuda/products.cu", name) for name, tensor in tensors if tensor == "yes"]
    of_panels = "".join((KERNELS / f"cuda/panel_{name}.h").read_text() for name in COLUMNS)
    streamed = re.findall(r"^struct Columns256<(\w+)>", of_panels, re.M)
    panels += [Unit(f"expert_panels_{name}", "cuda/expert_panels.cu", name) for name in map(str.lower, streamed)]
    others = ["blocks", "enter_experts", "prefill", "wide_tokens", "exact", "flash_attention", "warpgroup_attention"]
    others += ["latent_attention", "chosen_attention", "block_attention", "latent_products", "tensor_decode", "early"]
    others += ["joint_rows", "joint_experts", "meet"]
    return common + gemm + wide + batched + panels + [Unit(name, f"cuda/{name}.cu") for name in others]


def included(file: str, seen: list[str]) -> list[str]:
    """A file of kernels and what it includes for CUDA, each once."""
    if file not in seen:
        seen.append(file)
        for name in re.findall(r'^#include "(.+)"$', (KERNELS / file).read_text(), re.M):
            beside = (Path(file).parent / name).as_posix()
            name = beside if (KERNELS / beside).exists() else name
            if "emulator/" not in name and "metal/" not in name:
                included(name, seen)
    return seen


def essence(text: str) -> str:
    """A text without comments, and without space that means nothing: formatting compiles to the same."""
    lines = [re.sub(r"//.*", "", line).strip() for line in text.replace("\\\n", " ").split("\n")]
    # A directive ends with its line, and space after a macro's name means something.
    code = "".join(f"\n{' '.join(line.split())}\n" if line.startswith("#") else f" {line} " for line in lines)
    code = re.sub(r"\s+", lambda found: "\n" if "\n" in found.group() else " ", code)
    operators = re.escape("+-*/%&|^<>=!:.#")
    needless = (rf"(?<![\w{operators}]) | (?![\w{operators}])|(?<=\w) (?=[{operators}])|(?<=[{operators}]) (?=\w)")
    return "\n".join(line if line.startswith("#") else re.sub(needless, "", line, flags=re.ASCII)
                     for line in code.strip().split("\n"))


def compiled_from(file: str, encoding: str | None) -> str:
    """A file as a unit depends on it: not on columns of the encodings' table that only say which units there are, nor on how
    other encodings than the unit's are unpacked."""
    text = (KERNELS / file).read_text()
    if encoding:
        unpackers = re.compile(r"^template <>\nstruct Encoding<(\w+)> \{\n.*?^\};\n", re.M | re.S)
        text = unpackers.sub(lambda found: found.group() if found.group(1) == encoding.upper() else "", text)
    text = essence(text)
    return re.sub(r"\bX\((\w+(?:, \w+){4}), \w+, \w+\)", r"X(\1)", text) if file.endswith("encodings.h") else text


def fingerprint(unit: Unit) -> str:
    """Of what a unit is compiled from, so that a test without a compiler can tell that archives are of the sources:
    64-bit FNV-1a."""
    parts = [f"{file}\n{compiled_from(file, unit.encoding)}\n" for file in included(unit.file, [])]
    value = 0xCBF29CE484222325
    for byte in "".join([unit.name, "\n", *parts]).encode():
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"


def compile_unit(tools: Path, unit: Unit) -> Compiled:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "unit.cu").write_text(f'#include "{unit.file}"\n')
        for target in (["-arch=compute_80", "--ptx"], [f"-arch={unit.target()}", "-cubin"]):
            command = [tools / "nvcc", "-std=c++17", "-O3", *target, "-I", KERNELS, *unit.definitions(), "unit.cu"]
            run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if run.returncode != 0:
                sys.exit(f"{unit.name}\n{run.stdout}{run.stderr}")
        ptx, image = (folder / "unit.ptx").read_text(), (folder / "unit.cubin").read_bytes()
    # Comments name files and builds; the texts must depend on the sources alone. The pragma is a hint that only newer
    # versions of PTX know.
    needless = ("//", ".pragma \"used_bytes_mask")
    lines = [line for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith(needless)]
    ptx = re.sub(r"^\.version .*", f".version {PTX_VERSION}", "\n".join(lines) + "\n", flags=re.M)
    ptx = re.sub(r"_INTERNAL_[0-9a-f]{8}_\d+_unit_cu_", "_", ptx)
    return Compiled(split(ptx), ptx, image)


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
    return dict(sorted(kernels.items()))


def same_text(a: dict[str, str], b: dict[str, str]) -> bool:
    """Whether texts of kernels differ at most in how long the names of files were that their own names come from."""
    def plain(texts: dict[str, str]) -> dict[str, str]:
        return {name: re.sub(r"_ZZN\d+_", "_ZZN_", text) for name, text in texts.items()}
    return plain(a) == plain(b)


def instructions(image: bytes) -> dict[str, bytes]:
    """The machine code of each kernel of an ELF image. The data that it reads is also in the kernels' texts."""
    start, = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    sections = [struct.unpack_from("<2I4Q", image, start + i * size) for i in range(count)]
    strings = sections[names][4]
    found = {}
    for name, _, _, _, offset, length in sections:
        label = image[strings + name:image.index(b"\0", strings + name)].decode()
        if label.startswith(".text."):
            found[label] = image[offset:offset + length]
    return found


def archived(unit: Unit) -> tuple[dict[str, str], bytes]:
    """Texts and machine code of a unit as they are in the archives; nothing if they are not."""
    text, image = ARCHIVES / "ptx" / f"{unit.name}.z", ARCHIVES / "sm_90" / f"{unit.name}.z"
    if not text.exists() or not image.exists():
        return {}, b""
    parts = zlib.decompress(text.read_bytes()).decode().split(MARK)[1:]
    return dict(part.split("\n", 1) for part in parts), zlib.decompress(image.read_bytes())


def index() -> dict[str, Row]:
    rows = re.findall(r'^    unit!\("(\w+)", "(\w+)", \[(.*)\]\),$', INDEX.read_text(), re.M) if INDEX.exists() else []
    return {name: Row(value, re.findall(r'"(\w+)"', kernels)) for name, value, kernels in rows}


def write_index(rows: dict[str, Row]) -> None:
    text = "// Written by `tools/cuda/build_kernels.py`: units, fingerprints of what they were compiled from, their kernels.\n&[\n"
    for name, row in rows.items():
        kernels = ", ".join(f'"{kernel}"' for kernel in row.kernels)
        text += f'    unit!("{name}", "{row.fingerprint}", [{kernels}]),\n'
    INDEX.write_text(text + "]\n")


def write(unit: Unit, compiled: Compiled) -> str:
    """Archives a unit; says what of it has changed. What has not stays as it is, byte for byte."""
    texts, image = archived(unit)
    same = same_text(texts, compiled.texts)
    same_code = same and bool(image) and instructions(image) == instructions(compiled.image)
    text = "".join(f"{MARK}{kernel}\n{text}" for kernel, text in compiled.texts.items())
    changed = []
    for what, same, content in ("ptx", same, text.encode()), ("sm_90", same_code, compiled.image):
        if not same:
            (ARCHIVES / what).mkdir(parents=True, exist_ok=True)
            (ARCHIVES / what / f"{unit.name}.z").write_bytes(zlib.compress(content, 9))
            changed.append(what)
    return f"{unit.name}: {' and '.join(changed) or 'as it was'}"


def checksum(unit: Unit, row: Row | None) -> str:
    """Of what a unit is compiled from, with what, and what it was compiled to."""
    files = [Path(__file__).parent / "requirements.txt", *(ARCHIVES / what / f"{unit.name}.z" for what in ("ptx", "sm_90"))]
    named = [unit.name, fingerprint(unit), *(row or Row("", [])), *ARCHITECTURES]
    found = hashlib.sha256(repr(named).encode())
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest() if file.exists() else b"none")
    return found.hexdigest()[:32]


def record() -> dict[str, str]:
    """Sums by unit, of those that were compiled to their archives and assembled."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return dict(line.split(" ") for line in lines if not line.startswith("#"))


def unrecorded(every: list[Unit]) -> list[Unit]:
    rows, known = index(), record()
    return [unit for unit in every if known.get(unit.name) != checksum(unit, rows.get(unit.name))]


def write_record(every: list[Unit], passed: list[Unit]) -> None:
    rows, known = index(), record()
    known |= {unit.name: checksum(unit, rows[unit.name]) for unit in passed}
    lines = [f"{unit.name} {known[unit.name]}" for unit in every if unit.name in known]
    head = "# Written by `tools/cuda/build_kernels.py --assemble`: units and sums, see there."
    RECORD.write_text("\n".join([head, *lines]) + "\n")


def size(unit: Unit) -> int:
    """Bytes of a unit's archives."""
    return sum(file.stat().st_size for what in ("ptx", "sm_90") for file in (ARCHIVES / what).glob(f"{unit.name}.z"))


def turn(every: list[Unit]) -> tuple[Unit, str]:
    """A unit for each commit, of those that compile in seconds, and an architecture."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    number = int(run.stdout[:8] or "0", 16)
    small = [unit for unit in every if size(unit) <= MOST_BY_TURNS] or every
    return small[number % len(small)], ARCHITECTURES[number // len(small) % len(ARCHITECTURES)]


def assemble(tools: Path, name: str, ptx: str, architecture: str) -> str | None:
    """Assembles a text; says whether registers spill."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / f"{name}.ptx"
        source.write_text(ptx)
        command = [tools / "ptxas", f"-arch={architecture}", "-v", source, "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{name} for {architecture}: {run.stdout}{run.stderr}")
    spill = re.search(r"\b([1-9]\d*) bytes spill stores", run.stderr)
    return f"note: {name} for {architecture} spills {spill.group(1)} bytes of registers" if spill else None


def build(
    tools: Path, pool: ThreadPoolExecutor, every: list[Unit], others: list[Unit]
) -> list[tuple[Unit, Compiled]]:
    """Compiles the units whose sources have changed, and `others`, and archives each as soon as it is."""
    rows, wanted = index(), {unit: fingerprint(unit) for unit in every}
    changed = [unit for unit in every if unit.name not in rows or rows[unit.name].fingerprint != wanted[unit]]
    stale = [unit for unit in every if unit in changed or unit in others]
    done = []
    for unit, compiled in zip(stale, pool.map(lambda unit: compile_unit(tools, unit), stale)):
        done.append((unit, compiled))
        print(write(unit, compiled), flush=True)
        rows[unit.name] = Row(wanted[unit], list(compiled.texts))
        write_index({unit.name: rows[unit.name] for unit in every if unit.name in rows})
    names = {unit.name for unit in every}
    write_index({unit.name: rows[unit.name] for unit in every})
    for file in [file for file in ARCHIVES.glob("*/*.z") if file.stem not in names]:
        file.unlink()
    return done


def check(
    tools: Path, pool: ThreadPoolExecutor, every: list[Unit], chosen: list[Unit]
) -> list[tuple[Unit, Compiled]]:
    """Compiles the chosen units, and ends the program if the archives are not theirs."""
    compiled = list(zip(chosen, pool.map(lambda unit: compile_unit(tools, unit), chosen)))
    rows, stale, owners = index(), [], {}

    def is_archived(unit: Unit, now: Compiled) -> bool:
        texts, image = archived(unit)
        # Machine code names what the compiler is run on, so that only instructions are compared.
        return same_text(texts, now.texts) and bool(image) and instructions(image) == instructions(now.image)

    for unit, now in compiled:
        # Of large kernels the compiler gives one of two texts, by chance.
        again = (compile_unit(tools, unit) for _ in range(MOST_COMPILED_AGAIN))
        is_fresh = rows.get(unit.name) == Row(fingerprint(unit), list(now.texts))
        if not is_fresh or not (is_archived(unit, now) or any(is_archived(unit, other) for other in again)):
            stale.append(unit.name)
    for name, row in rows.items():
        for kernel in row.kernels:
            if kernel in owners:
                sys.exit(f"two kernels are called {kernel}: in {owners[kernel]} and {name}")
            owners[kernel] = name
    stale += sorted(rows.keys() - {unit.name for unit in every})
    if stale:
        sys.exit(f"{ARCHIVES.relative_to(ROOT)} is not of the sources, run {Path(__file__).name}: {', '.join(stale)}")
    print(f"{len(owners)} kernels of {len(every)} units: as the sources say; compiled {', '.join(u.name for u in chosen)}")
    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the archives what the record does not have")
    parser.add_argument("--all", action="store_true", help="compile every unit")
    parser.add_argument("--assemble", action="store_true", help="assemble what was compiled for every architecture")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    options = parser.parse_args()
    tools, every = toolkit(), units()
    open_units = every if options.all else unrecorded(every)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.check:
            chosen = [unit for unit in every if unit in open_units or unit == turn(every)[0]]
            compiled = check(tools, pool, every, chosen)
        else:
            compiled = build(tools, pool, every, open_units if options.all or options.assemble else [])
        sizes = [sum(file.stat().st_size for file in (ARCHIVES / what).glob("*.z")) >> 10 for what in ("ptx", "sm_90")]
        print(f"deflated: {sizes[0]} KiB of PTX, {sizes[1]} KiB of machine code")
        if options.assemble:
            # On record are units that have been assembled for all.
            wanted = {unit: ARCHITECTURES if unit in open_units else [turn(every)[1]] for unit, _ in compiled}
            jobs = [(unit.name, one.whole, a) for unit, one in compiled for a in wanted[unit]]
            notes = [note for note in pool.map(lambda job: assemble(tools, *job), jobs) if note]
            print("\n".join(notes + [f"{unit.name}: assembled for {', '.join(wanted[unit])}" for unit in wanted]))
            if not options.check:
                write_record(every, [unit for unit, _ in compiled])


if __name__ == "__main__":
    main()
