"""Loads the object file of one kernel without Numba and LLVM.

LLVM's object files for x86-64 in the large code model need few relocations: addresses in the file
itself, and those of functions of the C library and of Python. The latter are reached only by code
that reports an exception, which kernels do not raise.
"""

import ctypes
import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian
RELOCATABLE, X86_64 = 1, 62
SYMTAB, RELA, NOBITS = 2, 4, 8  # types of sections
ALLOCATED = 2  # a flag of sections
UNDEFINED, COMMON = 0, 0xFFF2  # instead of a section's number
ABSOLUTE_64, RELATIVE_32, PLT_32, RELATIVE_64 = 1, 2, 4, 24  # kinds of relocations
UNWINDING = ".eh_frame"
ENTRY_PREFIX = "cfunc."  # begins the symbol of the function that Numba makes for C
# Only what reports exceptions calls these functions of Numba.
NUMBA_PREFIXES = ("numba_", "NRT_")

_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class BadObject(ValueError):
    """An object file that cannot be loaded here."""


class MachineCode:
    """The code of one kernel in memory, which it keeps for its own life."""

    def __init__(self, data: bytes) -> None:
        """Raises `BadObject`."""
        try:
            self._load(_Object.parse(data))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise BadObject(f"the object file is damaged: {error}") from None

    def _load(self, file: "_Object") -> None:
        places, size = file.layout()
        self._memory = mmap.mmap(-1, max(size, 1))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for section, place in places.items():
            data = file.contents(section)
            self._memory[place : place + len(data)] = data
        symbols = file.addresses(places, base)
        for section, place in places.items():
            for relocation in file.relocations(section):
                self._relocate(relocation, place + relocation.offset, base, symbols)
        entry = [each for each in file.symbols if each.name.startswith(ENTRY_PREFIX)]
        if len(entry) != 1:
            raise BadObject(f"the object file has {len(entry)} entries instead of 1")
        self.address = symbols[entry[0].number]
        if _libc.mprotect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise BadObject("the system does not let this process make memory executable")

    def _relocate(
        self, relocation: "_Relocation", place: int, base: int, symbols: dict[int, int]
    ) -> None:
        value = symbols[relocation.symbol] + relocation.addend
        if relocation.kind == ABSOLUTE_64:
            struct.pack_into("<Q", self._memory, place, value % (1 << 64))
        elif relocation.kind == RELATIVE_64:
            struct.pack_into("<q", self._memory, place, value - base - place)
        elif relocation.kind in (RELATIVE_32, PLT_32):
            struct.pack_into("<i", self._memory, place, value - base - place)
        else:
            raise BadObject(f"relocations of kind {relocation.kind} are not supported")


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    number: int
    name: str
    section: int
    value: int
    size: int


class _Relocation(NamedTuple):
    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object file: its sections and symbols."""

    data: bytes
    sections: list[_Section]
    names: list[str]  # the names of the sections
    symbols: list[_Symbol]

    @classmethod
    def parse(cls, data: bytes) -> "_Object":
        if not data.startswith(MAGIC):
            raise BadObject("it is not an object file")
        kind, machine = struct.unpack_from("<HH", data, 16)
        if (kind, machine) != (RELOCATABLE, X86_64):
            raise BadObject("it is not an object file for x86-64")
        start = struct.unpack_from("<Q", data, 40)[0]
        size, count, names_at = struct.unpack_from("<HHH", data, 58)
        sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", data, start + number * size))
            for number in range(count)
        ]
        strings = sections[names_at].offset
        names = [_string(data, strings + each.name) for each in sections]
        table = next((each for each in sections if each.kind == SYMTAB), None)
        if table is None:
            raise BadObject("it has no symbols")
        strings, symbols = sections[table.link].offset, []
        for number in range(table.size // table.entry_size):
            at = table.offset + number * table.entry_size
            name, _, _, section, value, symbol_size = struct.unpack_from("<IBBHQQ", data, at)
            symbols.append(
                _Symbol(number, _string(data, strings + name), section, value, symbol_size)
            )
        return cls(data, sections, names, symbols)

    def layout(self) -> tuple[dict[int, int], int]:
        """Where each section that is loaded is placed, and the size of all with common symbols."""
        places, end = {}, 0
        for number, section in enumerate(self.sections):
            if section.flags & ALLOCATED and self.names[number] != UNWINDING:
                end = _aligned(end, section.alignment)
                places[number] = end
                end += section.size
        return places, end + sum(
            _aligned(each.size, 64) + 64 for each in self.symbols if each.section == COMMON
        )

    def contents(self, number: int) -> bytes:
        section = self.sections[number]
        if section.kind == NOBITS:
            return b""
        data = self.data[section.offset : section.offset + section.size]
        if len(data) < section.size:
            raise BadObject("it is shorter than its sections")
        return data

    def relocations(self, number: int) -> list[_Relocation]:
        """The relocations in a section."""
        found = []
        for section in self.sections:
            if section.kind == RELA and section.info == number:
                for at in range(section.offset, section.offset + section.size, section.entry_size):
                    offset, info, addend = struct.unpack_from("<QQq", self.data, at)
                    found.append(_Relocation(offset, info & 0xFFFFFFFF, info >> 32, addend))
        return found

    def addresses(self, places: dict[int, int], base: int) -> dict[int, int]:
        """The address of each symbol that a loaded section can name, by its number."""
        found: dict[int, int] = {}
        end = max((place + self.sections[each].size for each, place in places.items()), default=0)
        for symbol in self.symbols:
            if symbol.section in places:
                found[symbol.number] = base + places[symbol.section] + symbol.value
            elif symbol.section == COMMON:
                end = _aligned(end, 64)
                found[symbol.number] = base + end
                end += symbol.size
            elif symbol.section == UNDEFINED and symbol.name:
                found[symbol.number] = _address_of(symbol.name)
        return found


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // max(alignment, 1)) * max(alignment, 1)


def _address_of(name: str) -> int:
    """The address of a function or variable of this process; raises `BadObject` if it has none."""
    if name.startswith(NUMBA_PREFIXES):
        name = "abort"
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, name))
    except ValueError:
        raise BadObject(f"nothing here has the name {name}") from None
