"""The mark for torch.compile is PyTorch's own."""

import torch

from polysketch.ops.compiling import asked_once


def test_the_mark_is_that_of_the_public_decorator():
    def ours() -> None: ...

    def public() -> None: ...

    assert vars(asked_once(ours)) == vars(torch.compiler.assume_constant_result(public)) != {}


def test_the_answer_is_a_constant_of_the_graph():
    asked = []

    @asked_once
    def answer() -> int:
        asked.append(1)
        return 3

    compiled = torch.compile(lambda x: x * answer(), backend="eager", fullgraph=True)
    assert [compiled(torch.tensor(2.0)).item() for _ in range(3)] == [6.0, 6.0, 6.0]
    assert len(asked) == 1
