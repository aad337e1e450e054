"""Small kernels, written by hand, and their launch: for tests of the executor itself."""

import torch
from torch import Tensor

from ptx.executing import execute
from ptx.global_memory import GlobalMemory
from ptx.parsing import parse


def kernel(body: str, tensors: int) -> str:
    """A module whose only kernel has the addresses of so many tensors in %rd0, %rd1, ..., and its thread in %r0."""
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 kernel_param_{i}" for i in range(tensors))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [kernel_param_{i}];" for i in range(tensors))
    head = f".version 8.7\n.target sm_90a\n.visible .entry kernel({parameters})\n.reqntid 32\n"
    return f"{head}{{\n.reg .b32 %r<99>;\n{loads}\nmov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"


def run(body: str, *tensors: Tensor, threads: int = 32, blocks: int = 1, shared: int = 0) -> None:
    """Launch a kernel on tensors of the CPU, which it may change."""
    memory = GlobalMemory()
    for tensor in tensors:
        assert tensor.is_contiguous()
        memory.add(tensor)
    program = parse(kernel(body, len(tensors)))
    addresses = [tensor.data_ptr() for tensor in tensors]
    parameters = dict(zip(program.parameters, addresses, strict=True))
    execute(program, blocks, threads, parameters, memory, shared, longest=1_000)


def own(register: str, tensor: int, size: int) -> str:
    """Put the address of this thread's `size` bytes of a tensor into a register."""
    return f"mad.wide.u32 {register}, %r0, {size}, %rd{tensor};"


def copied_into_shared(tensor: int, size: int, threads: int, at: int = 0) -> str:
    """Copy the first `size` bytes of a tensor into shared memory, 16 of every thread at a time; uses %r90 to %r95."""
    steps = [f"{own('%rd90', tensor, 16)}\nshl.b32 %r90, %r0, 4;\nadd.s32 %r90, %r90, {at};"]
    for start in range(0, size, 16 * threads):
        steps.append(f"ld.global.v4.b32 {{%r91, %r92, %r93, %r94}}, [%rd90+{start}];")
        steps.append(f"st.shared.v4.b32 [%r90+{start}], {{%r91, %r92, %r93, %r94}};")
    return "\n".join(steps)


def bits(*values: int) -> Tensor:
    """Numbers of 32 bits."""
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)
