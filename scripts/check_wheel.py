"""Check that a built wheel is what its name says.

``python scripts/check_wheel.py --tag manylinux_2_28_x86_64 dist/*.whl`` prints one line a fault and exits 1,
or says what it looked at and exits 0. Four things go wrong silently with wheels of compiled code:

* the stable-ABI wheel asked for comes out bound to one Python version;
* the platform tag promises an older glibc than the library's symbols need;
* instructions of the build machine's CPU are baked in, and older CPUs die of SIGILL;
* a file that users need is missing, or one they do not need came along.

Faster instructions are allowed in functions chosen at run time only. Such a function carries the name of the
feature it needs in its path (``kernels::avx2::...``). This script goes by that name, which is why the release
build keeps its symbol names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

REQUIRED = ("routed_experts/py.typed", "routed_experts/_core.pyi", "routed_experts/_core.abi3.so")
EXPECTED_SUFFIXES = (".py", ".pyi", *REQUIRED)
EXPECTED_METADATA = re.compile(
    r"routed_experts-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE|sboms/[^/]+\.json)"
)
# The libraries that PEP 600 lets a manylinux wheel count on, as far as Rust code needs any.
SYSTEM_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
}
# Feature names in a symbol's path that mark a function as chosen at run time; `_with_fma` are those of Rust's own
# library, whose multiply-add asks the processor.
DISPATCHED = re.compile(r"avx2|avx512|ssse3|sse4|amx|_with_fma")
# Past SSE2: whatever is VEX or EVEX encoded (named v..., or on wide registers), and the later extensions by
# name. tzcnt is left out: it is how a disassembler prints the baseline's `rep bsf`.
LATER_INSTRUCTION = re.compile(
    r"""^(?: v(?!err|erw)\w+ | haddp[sd] | hsubp[sd] | addsubp[sd] | lddqu | movddup | movs[hl]dup
    | phadd\w+ | phsub\w+ | pabs[bwd] | psign[bwd] | pshufb | palignr | pmaddubsw | pmulhrsw
    | p?blend\w+ | dpp[sd] | extractps | insertps | mpsadbw | packusdw | pcmpeqq | pcmpgtq | pextr[bdq]
    | phminposuw | pinsr[bdq] | p(?:max|min)(?:sb|sd|ud|uw) | pmov[sz]x\w+ | pmuldq | pmulld | ptest
    | round[ps][sd] | movntdqa | pcmp[ei]str[im] | crc32\w* | popcnt\w* | lzcnt\w* | movbe\w* | andn | bextr
    | bls[ir] | blsmsk | bzhi | mulx | pdep | pext | rorx | sarx | shlx | shrx | adcx | adox
    | aes\w+ | sha(?:1|256)\w+ | pclmul\w+ | gf2p8\w+ | tdp\w+ | tile\w+ )$""",
    re.VERBOSE,
)
PREFIXES = {"rep", "repz", "repnz", "lock", "cs", "ds", "es", "ss", "data16", "addr32", "bnd", "notrack"}


def objdump(*arguments: str) -> str:
    """Return what binutils' objdump prints."""
    return subprocess.run(["objdump", *arguments], check=True, capture_output=True, text=True).stdout


def later_instructions(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (function, instruction) where one is past baseline x86-64 and not chosen at run time."""
    function, seen = "?", 0
    for line in objdump("-d", "--no-show-raw-insn", str(library)).splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif "\t" in line:
            seen += 1
            text = line.split("\t", 1)[1].strip()
            name = next((word for word in text.split() if word not in PREFIXES), "")
            wide = "%ymm" in text or "%zmm" in text
            if (wide or LATER_INSTRUCTION.match(name)) and not DISPATCHED.search(function):
                yield function, text
    if not seen:
        raise RuntimeError(f"objdump found no instruction in {library}")


def check_library(library: Path, glibc: tuple[int, int]) -> Iterator[str]:
    """Yield the faults of one shared library: glibc symbols, libraries, instructions."""
    name, headers = library.name, objdump("-p", str(library))
    versions = {(int(a), int(b)) for a, b in re.findall(r"\bGLIBC_(\d+)\.(\d+)", headers)}
    if not versions:
        yield f"{name}: no GLIBC_ version found, so nothing was checked"
    elif max(versions) > glibc:
        yield f"{name}: needs glibc {max(versions)}, and its tag promises {glibc}"
    for needed in sorted(set(re.findall(r"NEEDED\s+(\S+)", headers)) - SYSTEM_LIBRARIES):
        yield f"{name}: needs {needed}, which a manylinux system may lack"
    faults: dict[str, list[str]] = {}
    for function, text in later_instructions(library):
        faults.setdefault(function, []).append(text)
    for function, texts in faults.items():
        yield f"{name}: {len(texts)} instructions past baseline x86-64 in {function}, first: {texts[0]}"


def check_files(names: list[str]) -> Iterator[str]:
    """Yield what is missing from, or has no place in, the list of files."""
    missing = set(REQUIRED) - set(names)
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        missing.add("licenses/LICENSE")
    yield from (f"missing: {name}" for name in sorted(missing))
    for name in names:
        ours = name.startswith("routed_experts/") and name.endswith(EXPECTED_SUFFIXES)
        if not (ours or EXPECTED_METADATA.fullmatch(name)):
            yield f"stray: {name}"


def check_tag(wheel: Path, metadata: str, tag: str) -> Iterator[str]:
    """Yield where the wheel's name or its WHEEL file differs from cp310-abi3-``tag``."""
    wanted = f"cp310-abi3-{tag}"
    if not wheel.name.endswith(f"-{wanted}.whl"):
        yield f"{wheel.name}: not the {wanted} that was asked for"
    tags = re.findall(r"^Tag: (\S+)", metadata, re.MULTILINE)
    if tags != [wanted]:
        yield f"the WHEEL file says {tags}, needed: {wanted}"


def check(wheel: Path, tag: str) -> list[str]:
    """Return every fault of ``wheel``; empty when it is true to ``tag`` (such as manylinux_2_28_x86_64)."""
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", tag)
    if match is None:
        raise ValueError(f"tag {tag!r} is not of the form manylinux_X_Y_x86_64")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        metadata = "".join(archive.read(n).decode() for n in names if n.endswith(".dist-info/WHEEL"))
        faults = [*check_tag(wheel, metadata, tag), *check_files(names)]
        for name in names:
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                faults += check_library(library, (int(match[1]), int(match[2])))
    return faults


def main() -> int:
    """Check the wheels named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--tag", required=True, help="platform tag asked for, such as manylinux_2_28_x86_64")
    arguments = parser.parse_args()
    faults = [fault for wheel in arguments.wheels for fault in check(wheel, arguments.tag)]
    for fault in faults:
        print(f"FAULT {fault}")
    if not faults:
        print(f"{len(arguments.wheels)} wheel: cp310-abi3, true to {arguments.tag}, baseline x86-64, complete")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
