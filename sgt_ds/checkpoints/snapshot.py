"""A copy of a checkpoint's contents in host memory, so training continues while it is written.

Knows no file and no engine. The copy pickles to the same bytes as the original: what shares memory
or identity there shares it here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sgt_ds.checkpoints.host_memory import HostMemory

# Copies begin at multiples of this: tensors may be of any dtype.
_ALIGNMENT = 64
# Room for that, and for a counter beside each tensor.
_ROUNDING_BYTES = 4 * _ALIGNMENT


class Snapshots:
    """Copies nested values, one save after another, into memory that is used again.

    It stays: as many bytes as this rank writes into a checkpoint, page-locked where CUDA is there.
    A copy is valid until the next `begin`.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        """`moved`: told of each tensor that is copied."""
        self._moved = moved
        self._memory: list[HostMemory] = []
        self._place = (0, 0)  # of the next copy: which memory, and where in it
        self._seen: dict[int, Any] = {}
        self._originals: list[Any] = []  # an id is only good as long as its object lives
        self._storages: dict[int, torch.UntypedStorage] = {}

    def prepare(self, sizes: Iterable[int]) -> None:
        """Get memory for tensors of those sizes, beside what follows; `copy` gets what it lacks."""
        self._memory.append(HostMemory(sum(size + _ROUNDING_BYTES for size in sizes)))

    def begin(self) -> None:
        """Start the next save: its copies take the memory of the one before."""
        for memory in self._memory:
            memory.wait()
        self._memory = [memory for memory in self._memory if memory.fault is None]
        self._place = (0, 0)

    def end(self) -> None:
        """All is copied: wait for what is still on its way from the device."""
        self._seen, self._storages, self._originals = {}, {}, []
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def stop(self) -> None:
        """Get no more memory: the process ends, and waits for no device."""
        for memory in self._memory:
            memory.stop()

    def close(self) -> None:
        """Give the memory back. Copies in use stay."""
        for memory in self._memory:
            memory.close()
        self._memory = []

    def copy(self, value: Any) -> Any:
        """A deep copy of `value`: dicts, lists and tuples of tensors and plain objects."""
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        made: Any
        if isinstance(value, Tensor):
            made = self._tensor(value)
        elif isinstance(value, dict):
            made = copy.copy(value)  # keeps what kind of dict it is
            self._keep(value, made)
            for key, inner in value.items():
                made[key] = self.copy(inner)
            return made
        elif type(value) is list:
            made = []
            self._keep(value, made)
            made.extend(self.copy(inner) for inner in value)
            return made
        elif type(value) is tuple:
            inner_copies = tuple(self.copy(inner) for inner in value)
            same = all(new is old for new, old in zip(inner_copies, value, strict=True))
            made = value if same else inner_copies
        else:
            made = copy.deepcopy(value)
        self._keep(value, made)
        return made

    def _keep(self, value: Any, made: Any) -> None:
        self._seen[id(value)] = made
        self._originals.append(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        made = torch.empty(0, dtype=tensor.dtype).set_(
            self._storage(tensor.untyped_storage()),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The copy of a storage, made once however many tensors look into it."""
        key = storage._cdata
        if key not in self._storages:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            made = self._bytes(source) if storage.nbytes() else torch.empty(0)
            self._storages[key] = made.untyped_storage()
            self._originals.append(storage)
        return self._storages[key]

    def _bytes(self, source: Tensor) -> Tensor:
        """A copy in the next free memory: where it lay in the save before, of the same things."""
        self._moved()
        size, (which, offset) = source.numel(), self._place
        while which < len(self._memory) and offset + size > self._memory[which].size:
            which, offset = which + 1, 0
        if which == len(self._memory):
            more = HostMemory(size)
            more.wait()
            if more.fault is not None:
                raise MemoryError(more.fault)
            self._memory.append(more)
        self._place = which, offset + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._memory[which].copy(offset, source)
