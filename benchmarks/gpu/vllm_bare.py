"""``python benchmarks/gpu/vllm_bare.py WHEEL FOLDER --arch 9.0``: vLLM's CUDA wheel cut to what one GPU needs.

Python files, the main kernels for one compute capability, and the allocator of memory that sleeps stay. Flash attention, mixture
of experts and quantised formats go, so the engine needs the Triton attention backend and a dense model.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

KERNELS = "vllm/_C_stable_libtorch"
KEPT = (KERNELS, "vllm/cumem_allocator")
TEXTS = (".py", ".json", ".jinja")
RECORD = ".dist-info/RECORD"

CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes that follow it
ENTRY = struct.Struct("<HHIQ8xHHI")  # kind, flags, bytes of the header, bytes that follow it, minor, major, compute capability
MAGIC = (0xBA55ED50).to_bytes(4, "little")
PTX, CODE = 1, 2

STAND_IN = "# vLLM imports the kernels of flash attention wherever there is CUDA. The Triton backend calls none of them.\n"
FLASH = {"vllm/vllm_flash_attn/_vllm_fa2_C.py": STAND_IN}
"""Files of this wheel alone."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/vllm_bare.py", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="9.0", help="compute capability of the GPU, such as 9.0 or sm_120")
    asked = parser.parse_args()
    target = asked.folder / asked.wheel.name
    cut_wheel(asked.wheel, target, capability(asked.arch))
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB of {asked.wheel.stat().st_size / 2**20:.1f}")


def capability(text: str) -> int:
    """Return 90 for ``9.0``, ``sm_90`` or ``90``."""
    digits = text.removeprefix("sm_").replace(".", "")
    if not digits.isdecimal() or int(digits) < 50:
        raise SystemExit(f"vllm_bare.py: --arch {text}: name a compute capability, such as 9.0 or sm_120.")
    return int(digits)


def cut_wheel(wheel: Path, target: Path, arch: int) -> None:
    written, record = target.with_suffix(".partial"), io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as cut:
        if not any(name.startswith(KERNELS) for name in source.namelist()):
            raise SystemExit(f"{wheel}: it has no {KERNELS} library. Take a wheel of vllm for CUDA.")
        for name in (*source.namelist(), *FLASH):
            tuned = "/configs/" in name and name.endswith(".json")  # block sizes of kernels that are left out
            needed = name.startswith(KEPT) or name.endswith(TEXTS) or ".dist-info/" in name
            if not needed or tuned or name.endswith(RECORD):
                continue
            content = FLASH[name].encode() if name in FLASH else source.read(name)
            if name.startswith(KERNELS):
                content = for_one_arch(content, arch)
            cut.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow([name, f"sha256={digest}", len(content)])
        listing = next(name for name in source.namelist() if name.endswith(RECORD))
        rows.writerow([listing, "", ""])
        cut.writestr(listing, record.getvalue())
    written.replace(target)  # a wheel that is there is complete


def for_one_arch(library: bytes, arch: int) -> bytes:
    """Return a CUDA library of the same length in which device code that a GPU of ``arch`` does not load is zero.

    Headers stay, so that the driver chooses as before.
    """
    code = bytearray(library)
    for entries in containers(library):
        kept = loaded({(kind, of) for kind, of, _, _ in entries}, arch)
        for kind, of, start, end in entries:
            if (kind, of) != kept:
                code[start:end] = bytes(end - start)
    return bytes(code)


def loaded(there: set[tuple[int, int]], arch: int) -> tuple[int, int] | None:
    """Return which of a container's (kind, arch) a GPU loads: its own code, older code of its generation, or else PTX."""
    older = [(kind, of) for kind, of in there if of <= arch]
    fitting = [(kind, of) for kind, of in older if kind == CODE and of // 10 == arch // 10]
    return max(fitting or [(kind, of) for kind, of in older if kind == PTX], default=None)


def containers(library: bytes) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield each container of device code as its entries: kind, arch, and where the content begins and ends."""
    place = -1
    while (place := library.find(MAGIC, place + 1)) >= 0:
        if len(library) - place < CONTAINER.size:
            return
        _, version, header, size = CONTAINER.unpack_from(library, place)
        at, end = place + header, place + header + size
        if version != 1 or header != CONTAINER.size or end > len(library):
            continue  # the same four bytes by chance
        entries = []
        while at + ENTRY.size <= end:
            kind, _, of_header, of_content, _, _, arch = ENTRY.unpack_from(library, at)
            content = at + of_header
            assert at < content <= content + of_content <= end, f"device code at byte {place} has another form"
            entries.append((kind, arch, content, content + of_content))
            at = content + of_content
        yield entries
        place = end - 1


if __name__ == "__main__":
    main()
