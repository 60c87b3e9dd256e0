"""Notices what torch computes while a graph is recorded, which a replay would leave out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# What neither computes nor allocates: it reads what is known of a tensor, or makes a view of it.
VIEWS = frozenset(
    {
        *("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel"),
        *("size", "storage_offset", "stride"),
        *("as_strided", "chunk", "detach", "expand", "narrow", "permute", "select", "split"),
        *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
    }
)
SOMETIMES_VIEWS = frozenset({"__getitem__", "contiguous", "flatten", "float", "reshape"})


class TorchWatch(TorchFunctionMode):
    """While it is entered, `operations` gets the names of all functions of torch that are called,
    but for views. (A `TorchDispatchMode` would make torch import a third of its modules.)"""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        is_view = name in VIEWS or (name in SOMETIMES_VIEWS and _shares_memory(args[0], result))
        if not is_view:
            self.operations.append(name)
        return result


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
