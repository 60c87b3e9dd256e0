"""The experts of a layer over packed weights, in kernels of the thread pool only.

Only the weights of experts that a step uses are read, so in a mapped cache file those of idle
experts stay on the disk.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.cpu.build import kernel
from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import experts as kernels
from engine.worker.cpu.kernels.linears.linear import InputOperands, LinearOperands
from engine.worker.cpu.linears.packed import (
    CpuLinears,
    InputFormat,
    PackedWeights,
    address_of,
    columns_of_chunks,
    operands_of,
)
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import ExpertGroups, LinearWeight, Routing, ThreadPool


class ConvertedRows(NamedTuple):
    """Rows in the format of a linear's inputs."""

    values: Tensor  # contiguous
    row_bytes: int
    scale: Tensor | None  # float32 [rows], of quantized inputs


class InputConversion:
    """Converts rows to the format that linears of one width read."""

    def __init__(self, pool: ThreadPool, inputs: InputFormat, padded: int, kind: str) -> None:
        """`kind` names the memory of the results, as in `NativeThreadPool.empty`."""
        self._pool, self._inputs, self._padded, self._kind = pool, inputs, padded, kind
        operands = InputOperands(group=inputs.group, middle=inputs.middle, padded=padded)
        self._call = KernelCall(pool, inputs.convert, operands)

    def __call__(self, x: Tensor) -> ConvertedRows:
        rows, inputs, operands = len(x), self._inputs, self._call.operands
        items = self._padded // inputs.group * inputs.group_items
        values = self._pool.empty(f"{self._kind} inputs", (rows, items), inputs.dtype)
        scale = self._pool.empty(f"{self._kind} scales", (rows,)) if inputs.is_quantized else None
        operands.x, operands.x_stride, operands.width = x.data_ptr(), x.stride(0), x.shape[1]
        operands.y, operands.scale = values.data_ptr(), address_of(scale)
        self._call.over_rows(rows)
        return ConvertedRows(values, items * values.itemsize, scale)


class SortedPairs(NamedTuple):
    """The experts of a step's rows, as `kernels.sort_pairs` describes them."""

    weights: Tensor
    plan: Tensor
    order: Tensor
    places: Tensor
    max_in_use: int

    @property
    def size(self) -> int:
        return len(self.order)


class ExpertLinear:
    """One linear of each expert, all of one shape and format."""

    def __init__(
        self,
        pool: ThreadPool,
        linears: CpuLinears,
        weights: Sequence[PackedWeights],
        biases: Sequence[Tensor],
        kind: str,
    ) -> None:
        """Each bias has one float32 for each output."""
        first = weights[0]
        self.outputs = first.outputs
        self.conversion = (
            None
            if linears.inputs is None
            else InputConversion(pool, linears.inputs, first.inputs, kind)
        )
        self._weights = tuple(weights), tuple(biases)  # kernels keep addresses only
        self._table = (LinearOperands * len(weights))(
            *(
                operands_of(each, bias, pool.threads)
                for each, bias in zip(weights, biases, strict=True)
            )
        )
        self._scratch = torch.empty(pool.threads * kernels.SCRATCH_BYTES, dtype=torch.uint8)
        self._threads = pool.threads
        operands = kernels.ExpertLinearOperands(
            kernel=kernel(linears.kernel).address,
            table=ctypes.addressof(self._table),
            scratch=self._scratch.data_ptr(),
        )
        self._call = KernelCall(pool, kernels.expert_linear, operands)

    def convert(self, x: Tensor) -> ConvertedRows:
        """The rows in the format of the inputs; float32 rows themselves have to be contiguous."""
        if self.conversion is None:
            return ConvertedRows(x.contiguous(), x.shape[1] * x.itemsize, None)
        return self.conversion(x)

    def write(self, x: ConvertedRows, pairs: SortedPairs, y: Tensor, *, is_one_row: bool) -> None:
        """`y[pairs]`, sorted, from a row of `x` for each pair, or one row for all pairs."""
        call = self._call.operands
        call.plan, call.max_in_use = pairs.plan.data_ptr(), pairs.max_in_use
        in_use = pairs.max_in_use  # all experts have chunks, so each needs fewer
        columns = columns_of_chunks(self.outputs * in_use, self._threads)
        call.columns = columns(-(-pairs.size // in_use))
        call.column_chunks = -(-self.outputs // call.columns)
        call.x, call.x_stride = x.values.data_ptr(), 0 if is_one_row else x.row_bytes
        call.x_scale = address_of(x.scale)
        call.x_scale_stride = 0 if is_one_row or x.scale is None else x.scale.itemsize
        call.y, call.y_stride = y.data_ptr(), y.stride(0)
        self._call(call.column_chunks * in_use)


class NativeExperts:
    """`Experts` of gated MLPs. `up` and `down` have a linear for each format of neighbours."""

    def __init__(
        self,
        pool: ThreadPool,
        up: Sequence[ExpertLinear],
        down: Sequence[ExpertLinear],
        activation: Callable[[Tensor], Tensor],
        routing: Routing,
    ) -> None:
        self._pool, self._up, self._down = pool, up, down
        self._activation, self._routing = activation, routing
        top_k, groups = routing.top_k, routing.groups or ExpertGroups(0, 0, 0)
        self._route = KernelCall(
            pool,
            kernels.route,
            kernels.RouteOperands(
                top_k=top_k,
                renormalizes=routing.renormalizes,
                scales=address_of(routing.scales),
                bias=address_of(routing.bias),
                has_sigmoids=routing.has_sigmoids,
                groups=groups.num_groups,
                top_groups=groups.top_k,
                num_best=groups.num_best,
            ),
        )
        self._sort = KernelCall(pool, kernels.sort_pairs, kernels.SortOperands())
        self._gather = KernelCall(pool, kernels.gather_pairs, kernels.GatherOperands(top_k=top_k))
        self._combine = KernelCall(
            pool, kernels.combine_pairs, kernels.CombineOperands(top_k=top_k)
        )

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        pairs = self._sorted(logits)
        inner = self._multiply(self._up, x, pairs, "expert up", is_sorted=False)
        inner = self._activation(inner)
        outputs = self._multiply(self._down, inner, pairs, "expert down", is_sorted=True)
        return self._combined(outputs, pairs, len(x), add_to)

    def _sorted(self, logits: Tensor) -> SortedPairs:
        rows, num_experts = logits.shape
        count = rows * self._routing.top_k
        take, route, sort = self._pool.empty, self._route.operands, self._sort.operands
        ids = take("expert ids", (count,), torch.int32)
        max_in_use = min(num_experts, count)
        pairs = SortedPairs(
            weights=take("expert weights", (count,)),
            plan=take("expert plan", (2 + max_in_use + num_experts,), torch.int64),
            order=take("expert order", (count,), torch.int32),
            places=take("expert places", (count,), torch.int32),
            max_in_use=max_in_use,
        )
        route.logits, route.logits_stride = logits.data_ptr(), logits.stride(0)
        route.num_experts = sort.num_experts = num_experts
        route.ids, route.weights = ids.data_ptr(), pairs.weights.data_ptr()
        self._route.over_rows(rows)
        sort.ids, sort.pairs, sort.max_in_use = ids.data_ptr(), count, max_in_use
        sort.plan, sort.order = pairs.plan.data_ptr(), pairs.order.data_ptr()
        sort.places = pairs.places.data_ptr()
        self._sort(1)
        return pairs

    def _multiply(
        self,
        linears: Sequence[ExpertLinear],
        x: Tensor,
        pairs: SortedPairs,
        kind: str,
        *,
        is_sorted: bool,
    ) -> Tensor:
        """`[pairs, outputs]`, from rows that are those of sorted pairs already or not."""
        y = self._pool.empty(kind, (pairs.size, sum(each.outputs for each in linears)))
        is_one_row = not is_sorted and len(x) == 1
        first = 0
        for linear in linears:
            converted = linear.convert(x)
            if not is_sorted and not is_one_row:
                converted = self._gathered(converted, pairs)
            columns = y[:, first : first + linear.outputs]
            linear.write(converted, pairs, columns, is_one_row=is_one_row)
            first += linear.outputs
        return y

    def _gathered(self, x: ConvertedRows, pairs: SortedPairs) -> ConvertedRows:
        """The row of each sorted pair."""
        operands, shape = self._gather.operands, (pairs.size, *x.values.shape[1:])
        values = self._pool.empty("pair inputs", shape, x.values.dtype)
        scale = None if x.scale is None else self._pool.empty("pair scales", (pairs.size,))
        operands.order, operands.row_bytes = pairs.order.data_ptr(), x.row_bytes
        operands.x, operands.x_scale = x.values.data_ptr(), address_of(x.scale)
        operands.y, operands.y_scale = values.data_ptr(), address_of(scale)
        self._gather.over_rows(pairs.size)
        return ConvertedRows(values, x.row_bytes, scale)

    def _combined(
        self, outputs: Tensor, pairs: SortedPairs, rows: int, add_to: Tensor | None
    ) -> Tensor:
        width, operands = outputs.shape[1], self._combine.operands
        y = self._pool.empty("experts", (rows, width)) if add_to is None else add_to
        operands.x, operands.width = outputs.data_ptr(), width
        operands.weights, operands.places = pairs.weights.data_ptr(), pairs.places.data_ptr()
        operands.y, operands.y_stride, operands.adds = y.data_ptr(), y.stride(0), add_to is not None
        self._combine.over_rows(rows)
        return y


def expert_linears(
    pool: NativeThreadPool,
    store: PackedStore,
    weights: Sequence[Sequence[LinearWeight]],
    biases: Sequence[Tensor | None],
    kind: str,
) -> list[ExpertLinear]:
    """A linear of all experts for each run of weights of one format; each has weights and a
    bias."""
    of_experts = [store.packed(pool, each, is_sparse=True) for each in weights]
    made, first = [], 0
    for parts in zip(*of_experts, strict=True):
        linears, outputs = parts[0][0], parts[0][1].outputs
        assert all(one is linears for one, _ in parts), "experts have the same formats"
        own = [
            torch.zeros(outputs) if bias is None else bias[first : first + outputs]
            for bias in biases
        ]
        packed = [one for _, one in parts]
        made.append(ExpertLinear(pool, linears, packed, own, f"expert {kind}"))
        first += outputs
    return made
