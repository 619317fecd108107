"""A copy in host memory of what a checkpoint holds, so that training may go on while it is written.

Knows no file and no engine. The copy pickles to the same bytes as the original: what shares memory
or identity there shares it here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Snapshots:
    """Copies nested values, one save after another, into buffers that are used again.

    The buffers stay: they hold as many bytes as this rank writes into a checkpoint. Where CUDA is
    there they are page-locked, and torch rounds the size of each up to a power of two: at worst
    they take twice as much. A copy is valid until the next `begin`.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._seen: dict[int, Any] = {}
        self._originals: list[Any] = []  # an id is only good as long as its object lives
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._pin = torch.cuda.is_available()

    def begin(self) -> None:
        """Start the next save: its copies take the buffers of the one before."""
        self._used = 0

    def end(self) -> None:
        """All is copied: wait for what is still on its way from the device."""
        self._seen, self._storages, self._originals = {}, {}, []
        if self._pin:
            torch.cuda.synchronize()

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
            buffer = self._buffer(storage.nbytes())
            buffer.copy_(source, non_blocking=True)
            self._storages[key] = buffer.untyped_storage()
            self._originals.append(storage)
        return self._storages[key]

    def _buffer(self, size: int) -> Tensor:
        """The next buffer, of `size` bytes: that of the save before, which copied the same things."""
        if self._used < len(self._buffers) and self._buffers[self._used].numel() == size:
            buffer = self._buffers[self._used]
        else:
            del self._buffers[self._used :]
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin and size > 0)
            self._buffers.append(buffer)
        self._used += 1
        return buffer
