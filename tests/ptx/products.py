"""Products of warpgroups (`wgmma`) that are under way: which registers and which shared memory they hold.

Until `wgmma.wait_group` has waited for a product nobody may touch its accumulators, write to registers of its first
operand, or to shared memory that it reads; and registers that others wrote need `wgmma.fence` before a product takes
them, except accumulators between products of one shape. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
Instructions", `wgmma.fence` and `wgmma.wait_group`.

In one thing this is less strict than the ISA: a fence counts for what is written to registers behind it too, up to the
next `wgmma.commit_group`. LLVM moves copies and even conversions of a product's registers to between the fence and the
product in Triton's programs; `ptxas` moves the fence behind them.
"""

from dataclasses import dataclass, field, replace

from ptx.formats import Array
from ptx.parsing import Fault
from ptx.shared_memory import SharedMemory


@dataclass(frozen=True)
class Product:
    """One that is under way.

    Attributes:
        shape: as the opcode has it.
        accumulators, operands: registers.
        places: (blocks, n) addresses of the pieces of shared memory that it reads, for each operand there.
    """

    shape: str
    accumulators: tuple[str, ...]
    operands: tuple[str, ...]
    places: tuple[Array, ...]

    def taken(self, chosen: Array) -> "Product":
        """That of some of the blocks."""
        return replace(self, places=tuple(places[chosen] for places in self.places))


@dataclass
class Products:
    """Those of some blocks.

    Attributes:
        open: since the last `wgmma.commit_group`.
        groups: committed and not waited for, the oldest first.
        unfenced: registers that were written since the last `wgmma.fence`.
        fenced: whether there was one since the last `wgmma.commit_group`.
    """

    open: list[Product] = field(default_factory=list)
    groups: list[list[Product]] = field(default_factory=list)
    unfenced: set[str] = field(default_factory=set)
    fenced: bool = False
    _accumulators: dict[str, str] = field(default_factory=dict)
    _operands: set[str] = field(default_factory=set)

    def taken(self, chosen: Array) -> "Products":
        """Those of some of the blocks, by a truth value for each."""
        opened = [product.taken(chosen) for product in self.open]
        groups = [[product.taken(chosen) for product in group] for group in self.groups]
        return Products(opened, groups, set(self.unfenced), self.fenced, dict(self._accumulators), set(self._operands))

    def check_read(self, register: str) -> None:
        """Anybody but a product reads."""
        if register in self._accumulators:
            raise Fault(f"read of accumulator {register} before its product is waited for")

    def check_write(self, register: str) -> None:
        """Anybody but a product writes."""
        if register in self._accumulators or register in self._operands:
            raise Fault(f"write to {register}, which a product under way holds")
        self.unfenced.add(register)

    def start(self, product: Product) -> None:
        """A product begins."""
        for register in (*product.accumulators, *product.operands):
            if register in self.unfenced and not self.fenced:
                raise Fault(f"register {register} was written since the last wgmma.fence")
        for register in product.accumulators:
            if self._accumulators.get(register, product.shape) != product.shape:
                raise Fault(f"accumulator {register} of a product of another shape, without a wait between")
        self.open.append(product)
        self._hold(product)

    def fence(self) -> None:
        """`wgmma.fence`."""
        self.unfenced.clear()
        self.fenced = True

    def commit(self) -> None:
        """`wgmma.commit_group`."""
        self.groups.append(self.open)
        self.open, self.fenced = [], False

    def wait(self, left: int, shared: SharedMemory) -> None:
        """`wgmma.wait_group`: all but the last `left` groups are done."""
        done = self.groups[: len(self.groups) - left] if left else self.groups
        self.groups = self.groups[len(done) :]
        for product in (product for group in done for product in group):
            for places in product.places:
                shared.multiplied(places)
        self._accumulators, self._operands = {}, set()
        for product in (*(product for group in self.groups for product in group), *self.open):
            self._hold(product)
            for places in product.places:
                shared.hold(places)

    def _hold(self, product: Product) -> None:
        self._accumulators.update(dict.fromkeys(product.accumulators, product.shape))
        self._operands.update(product.operands)
